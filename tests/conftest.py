"""What all tests share. The environment is set before anything imports the hub's library, which reads it once."""

import os
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# The tests' own torch and several cores share the machine.
os.environ["OMP_WAIT_POLICY"] = "passive"
# Triton reads it when it is imported. Without a GPU its kernels are tried in its interpreter.
if os.environ.get("VLLM_MP_TEST_DEVICE") == "cpu" or not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from vllm_mp.model_store import DEFAULT_MODEL, resolve_model

pytest_plugins = ["support.engine_fixtures"]


@pytest.fixture(scope="session", autouse=True)
def _hub_is_offline() -> None:
    from huggingface_hub import constants

    assert constants.HF_HUB_OFFLINE, "the hub's library was imported before the tests could take it offline"


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The folder of the real default model, fetched and converted where this machine has none yet."""
    return resolve_model(DEFAULT_MODEL)
