"""Settings and fixtures of all tests. They set the environment before anything imports huggingface_hub or torch."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# The tests' own torch and several cores share the machine.
os.environ["OMP_WAIT_POLICY"] = "passive"
# Triton reads this variable when it is imported. On a machine without a GPU its interpreter runs the kernels.
if os.environ.get("VLLM_MP_TEST_DEVICE") == "cpu" or not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Shells start background jobs with SIGINT ignored, and child processes inherit that. Tests of Ctrl-C need the default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from vllm_mp.model_store import DEFAULT_MODEL, resolve_model

pytest_plugins = ["support.engine_fixtures", "support.time_limit"]

END_TO_END = {"engine", "faults", "server"}
"""Folders whose tests are `extended`, except those that are marked `essential`."""


# Searches try the same few examples in each run. `--hypothesis-profile=default` tries others.
settings.register_profile("few", max_examples=30, deadline=None, derandomize=True)


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--hypothesis-profile"):
        settings.load_profile("few")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(config.rootpath / "tests").parts[0]
        if folder in END_TO_END and item.get_closest_marker("essential") is None:
            item.add_marker(pytest.mark.extended)


@pytest.fixture(scope="session", autouse=True)
def _hub_is_offline() -> None:
    from huggingface_hub import constants

    assert constants.HF_HUB_OFFLINE, "huggingface_hub was imported before the tests could take it offline"


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_frozen_at_the_end() -> Iterator[None]:
    yield
    gc.unfreeze()  # libraries report frozen objects as leaks


@pytest.fixture(scope="module", autouse=True)
def _frozen_before_each_module() -> None:
    """Take what exists before the tests of a module out of garbage collections, which would visit a million objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def default_model() -> Path:
    """Return the folder of the real default model; fetch and convert it if this machine does not have it yet."""
    return resolve_model(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """Limit torch to one thread in the tests of a module, whose many small operations take longer with two."""
    from vllm_mp.core.torch_threads import one_thread

    with one_thread():
        yield
