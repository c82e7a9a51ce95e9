"""Real engines: a core process of their own, the real default model."""

import pytest

from vllm_mp import AsyncEngineArgs, AsyncLLM
from vllm_mp.model_store import resolve_model
from vllm_mp.testing.engines import ENGINE, running_engine


@pytest.fixture(scope="session")
def llm(default_model):
    """One engine for all tests that neither configure nor harm it."""
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(default_model), **ENGINE))
    yield engine
    engine.shutdown()


@pytest.fixture
def make_engine(default_model):
    """Engines with options of their own, shut down after the test."""
    engines = []

    def make(**options):
        engines.append(AsyncLLM.from_engine_args(AsyncEngineArgs(**{"model": str(default_model), **ENGINE, **options})))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()


@pytest.fixture(scope="session")
def minilm():
    """The folder of a real sentence encoder, fetched where this machine has none yet."""
    return resolve_model("all-minilm-l6-v2")


@pytest.fixture(scope="session")
def encoder(minilm):
    """One engine of it for all tests that neither configure nor harm it."""
    with running_engine(minilm, max_model_len=None) as engine:
        yield engine
