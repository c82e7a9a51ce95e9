"""Fixtures with real engines: each has its own core process and a real model."""

import pytest

from vllm_mp import AsyncEngineArgs, AsyncLLM
from vllm_mp.model_store import resolve_model
from vllm_mp.testing.engines import ENGINE, running_engine


@pytest.fixture(scope="session")
def llm(default_model):
    """An engine of the default model for all tests that neither configure nor harm it."""
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(default_model), **ENGINE))
    yield engine
    engine.shutdown()


@pytest.fixture
def make_engine(default_model):
    """A function that makes engines with own options. They are shut down after the test."""
    engines = []

    def make(**options):
        engines.append(AsyncLLM.from_engine_args(AsyncEngineArgs(**{"model": str(default_model), **ENGINE, **options})))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()


@pytest.fixture(scope="session")
def minilm():
    """The folder of a real sentence encoder, fetched at its first use on a machine."""
    return resolve_model("all-minilm-l6-v2")


@pytest.fixture(scope="session")
def encoder(minilm):
    """An engine of `minilm` for all tests that neither configure nor harm it."""
    with running_engine(minilm, max_model_len=None) as engine:
        yield engine
