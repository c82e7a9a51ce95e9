"""The dtype that dtype="auto" stands for."""

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


def config_of(fields, folder, **options):
    """Return the configuration of an engine for a model whose config.json has these fields."""
    (folder / "config.json").write_text(json.dumps(fields))
    args = AsyncEngineArgs(str(folder), device="cpu", load_format="dummy", skip_tokenizer_init=True, **options)
    return args.create_engine_config()


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
    config = config_of({**LLAMA, **changed}, tmp_path, **options)
    monkeypatch.setattr(cpu_info, "cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(device, "library", lambda: object() if has_kernels else None)
    assert choose_dtype(config, torch.device("cpu")) == expected


@pytest.mark.parametrize(
    ("name", "checkpoint", "has_bfloat16", "expected"),
    [
        ("llama", "float16", True, torch.float16),
        ("llama", "bfloat16", False, torch.bfloat16),
        ("llama", "float32", False, torch.float16),
        ("gemma2", "float16", True, torch.bfloat16),
        ("gemma3", "float16", True, torch.bfloat16),
        ("gemma3", "float32", False, torch.float32),
    ],
)
def test_gpu_computes_in_16_bits_whose_range_the_model_does_not_exceed(
    name, checkpoint, has_bfloat16, expected, monkeypatch, tmp_path
):
    config = config_of({**CONFIGS[name].to_dict(), "dtype": checkpoint}, tmp_path)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: has_bfloat16)
    assert choose_dtype(config, torch.device("cuda")) == expected


def test_float16_that_a_model_exceeds_is_warned_of(caplog, tmp_path):
    config = config_of(CONFIGS["gemma3"].to_dict(), tmp_path, dtype="float16")
    assert choose_dtype(config, torch.device("cpu")) == torch.float16
    assert "may exceed its range; leave it 'auto'" in caplog.text
