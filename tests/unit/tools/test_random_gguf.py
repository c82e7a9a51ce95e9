"""tools/quality/random_gguf.py: an engine computes with its file in place."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from support.local_engine import LocalEngine
from support.tiny_gguf import write_tiny_gguf

from vllm_mp.model_store.gguf import mapped_gguf

TOOL = runpy.run_path(str(Path(__file__).resolve().parents[3] / "tools" / "quality" / "random_gguf.py"))


@pytest.mark.extended
def test_a_model_with_random_blocks_is_served_in_place(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_MP_CACHE", str(tmp_path / "cache"))
    write_tiny_gguf(tmp_path / "tiny.gguf")
    file = tmp_path / "random.gguf"
    TOOL["write"](tmp_path / "tiny.gguf", file, TOOL["Sizes"](hidden=512, inner=768, heads=4, kv_heads=2, layers=9))
    engine = LocalEngine(str(file), dtype="bfloat16")
    assert mapped_gguf(engine.config.model_config.folder) is not None, "its weights were converted"
    engine.add(0, [1, 2, 3], 8)
    engine.run()
    assert len(engine.tokens[0]) == 8
    assert all(np.isfinite(np.frombuffer(values, np.float32)).all() for _, values in engine.logprobs[0])
