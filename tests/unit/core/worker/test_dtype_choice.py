"""The dtype that dtype="auto" stands for on a CPU."""

import json

import pytest
import torch
from support.image_models import image_fields

from vllm_mp import AsyncEngineArgs
from vllm_mp.core.worker import device
from vllm_mp.core.worker.device import choose_dtype
from vllm_mp.machine import cpu_info
from vllm_mp.testing.random_models import CONFIGS

LLAMA = CONFIGS["llama"].to_dict() | {"dtype": "bfloat16"}
BERT = {"architectures": ["BertModel"], "model_type": "bert", "intermediate_size": 64}
IMAGES = image_fields("llava") | {"dtype": "bfloat16"}
OTHER = {"architectures": ["OtherForCausalLM"], "n_positions": 100}


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
        (BERT, {"avx2"}, True, {}, torch.float32),
        (IMAGES, {"avx2"}, True, {}, torch.float32),
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
