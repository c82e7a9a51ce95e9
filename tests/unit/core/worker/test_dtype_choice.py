"""The dtype that dtype="auto" stands for on a CPU."""

import json

import pytest
import torch

from vllm_mp import AsyncEngineArgs
from vllm_mp.core.worker import device
from vllm_mp.core.worker.device import choose_dtype
from vllm_mp.machine import cpu_info

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "dtype": "bfloat16",
}
OTHER = {"architectures": ["OtherForCausalLM"], "vocab_size": 100, "hidden_size": 64, "n_positions": 100}


@pytest.mark.parametrize(
    ("changed", "flags", "has_kernels", "options", "expected"),
    [
        ({}, {"avx2", "avx512_bf16"}, False, {}, torch.bfloat16),
        ({"dtype": "float16"}, {"avx2", "amx_bf16"}, True, {}, torch.bfloat16),
        ({}, {"avx2"}, True, {}, torch.bfloat16),
        ({}, {"avx2"}, True, {"quantization": "int8"}, torch.bfloat16),
        ({}, {"avx2"}, True, {"dtype": "float32"}, torch.float32),
        ({}, {"avx2"}, True, {"quantization": "fp8"}, torch.float32),
        ({}, {"avx2"}, False, {}, torch.float32),
        ({"dtype": "float16"}, {"avx2"}, True, {}, torch.float32),
        ({"dtype": "float32"}, {"avx2"}, True, {}, torch.float32),
        (OTHER, {"avx2"}, True, {}, torch.float32),
    ],
)
def test_cpu_computes_in_bfloat16_where_that_costs_no_speed(
    changed, flags, has_kernels, options, expected, monkeypatch, tmp_path
):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changed}))
    config = AsyncEngineArgs(
        str(tmp_path), device="cpu", load_format="dummy", skip_tokenizer_init=True, **options
    ).create_engine_config()
    monkeypatch.setattr(cpu_info, "cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(device, "library", lambda: object() if has_kernels else None)
    assert choose_dtype(config, torch.device("cpu")) == expected
