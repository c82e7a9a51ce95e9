"""Real engines: a core process of their own, the real default model."""

import pytest
from harness import ENGINE

from vllm_mp import AsyncEngineArgs, AsyncLLM


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
