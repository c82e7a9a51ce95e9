"""tools/quality/perplexity.py: its formats and its table. tests/engine/test_quantization.py runs it."""

import runpy
from pathlib import Path

from vllm_mp import AsyncEngineArgs

TOOL = runpy.run_path(str(Path(__file__).resolve().parents[3] / "tools" / "quality" / "perplexity.py"))


def test_format_sets_dtype_quantization_cache_and_model(tmp_path):
    args = AsyncEngineArgs("a", quantization="int8")
    assert TOOL["options_of"]("float32", args) == AsyncEngineArgs("a", quantization="int8", dtype="float32")
    assert TOOL["options_of"]("fp8+kv-fp8", args) == AsyncEngineArgs("a", quantization="fp8", kv_cache_dtype="fp8")
    assert TOOL["options_of"]("kv-int8", args) == AsyncEngineArgs("a", quantization="int8", kv_cache_dtype="int8")
    file = tmp_path / "model.gguf"
    file.touch()
    assert TOOL["options_of"](str(file), args) == AsyncEngineArgs(str(file), quantization="int8")


def test_table_has_a_column_for_each_figure_of_any_format():
    lines = TOOL["table"]([{"format": "bfloat16", "tokens": 7}, {"format": "int8", "tokens": 7, "percent_more": 0.25}])
    assert lines.splitlines() == [
        "| format | tokens | percent_more |",
        "| --- | --- | --- |",
        "| bfloat16 | 7 |  |",
        "| int8 | 7 | 0.25 |",
    ]
