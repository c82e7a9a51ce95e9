"""An installation of the client alone says so where an engine is needed."""

import importlib.util

import pytest

from vllm_mp import AsyncEngineArgs
from vllm_mp.machine.installation import require_engine


@pytest.mark.parametrize("missing", ["vllm_mp.core", "torch"])
def test_engine_without_core_or_torch_is_refused_before_a_model_is_fetched(monkeypatch, missing):
    require_engine("the whole package")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    with pytest.raises(
        ValueError, match=f"model='no-such-model' needs the engine.* a client without {missing}: install"
    ):
        AsyncEngineArgs(model="no-such-model").create_engine_config()
