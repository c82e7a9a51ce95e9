"""The quantizations that a checkpoint may have, and the devices that compute 8-bit floats."""

import json
from typing import Any

import pytest
import torch

from vllm_mp import AsyncEngineArgs
from vllm_mp.config import VllmConfig
from vllm_mp.core.worker.device import check_float8, check_int8_cache
from vllm_mp.model_config.families.registry import read_architecture
from vllm_mp.model_config.quantization import FourBits

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
GPT2 = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 100, "n_embd": 64, "n_layer": 3, "n_head": 4}
OTHER = {"architectures": ["OtherForCausalLM"], "vocab_size": 100, "hidden_size": 64, "n_positions": 100}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCK = {**FP8, "weight_block_size": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}


def read(quantization: Any, base: dict[str, Any] = LLAMA) -> Any:
    return read_architecture({**base, "quantization_config": quantization})


@pytest.mark.parametrize(
    ("quantization", "scales"),
    [
        (None, None),
        ({}, None),
        (FP8, "tensor"),
        ({**FP8, "activation_scheme": "static", "ignored_layers": ["lm_head"]}, "tensor"),
        ({**FP8, "weight_block_size": None, "modules_to_not_convert": None}, "tensor"),
        (BLOCK, "block"),
        ({**BLOCK, "fmt": "e4m3", "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"]}, "block"),
        ({**BLOCK, "modules_to_not_convert": ["model.layers.0.mlp.gate", "model.layers.9.mlp", "vision.mlp"]}, "block"),
    ],
)
def test_fp8_checkpoints_of_the_llama_family_are_read(quantization: Any, scales: str | None) -> None:
    assert read(quantization).fp8 == scales


@pytest.mark.parametrize(
    ("quantization", "four_bits"),
    [
        (AWQ, FourBits("awq", 128)),
        ({"quant_method": "awq", "bits": 4, "group_size": -1}, FourBits("awq", 0)),
        (GPTQ, FourBits("gptq", 32, zero_offset=1)),
        ({**GPTQ, "desc_act": True, "sym": False, "checkpoint_format": "gptq_v2"}, FourBits("gptq", 32, True)),
    ],
)
def test_layout_of_a_checkpoint_with_4_bits_is_read(quantization: Any, four_bits: FourBits) -> None:
    arch = read(quantization)
    assert (arch.fp8, arch.blocks, arch.four_bits) == (None, four_bits.method, four_bits)
    for base in (GPT2, OTHER):
        with pytest.raises(ValueError, match=f"'{four_bits.method}'.* not supported for {base['architectures'][0]}"):
            read(quantization, base)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "compressed-tensors"}, r"'compressed-tensors'.* only quant_method 'fp8'"),
        ({**AWQ, "bits": 8}, r"'bits' is 8; awq is supported with 4"),
        ({**AWQ, "version": "gemv"}, r"'version' is 'gemv'; supported are gemm"),
        ({**AWQ, "group_size": 48}, r"'group_size' is 48; supported are multiples of 32"),
        ({**GPTQ, "desc_act": 1}, r"'desc_act' is 1"),
        ({**GPTQ, "checkpoint_format": "marlin"}, r"'checkpoint_format' is 'marlin'; supported are gptq, gptq_v2"),
        ({"bits": 4}, r"quant_method None.* only quant_method 'fp8'"),
        ("fp8", r"quant_method 'fp8'"),
        ({**FP8, "fmt": "e5m2"}, r"'fmt' is 'e5m2'; supported are e4m3"),
        ({**FP8, "activation_scheme": "none"}, r"'activation_scheme' is 'none'"),
        ({**FP8, "weight_block_size": [64, 128]}, r"'weight_block_size' is \[64, 128\]; supported are \[128, 128\]"),
        ({**FP8, "ignored_layers": "lm_head"}, r"'ignored_layers' is 'lm_head'; it must be a list"),
        (
            {**BLOCK, "modules_to_not_convert": ["lm_head", "model.layers.2.mlp"]},
            r"'modules_to_not_convert' names 'model\.layers\.2\.mlp'.*model\.layers\.2\.mlp\.gate_proj would not",
        ),
        ({**FP8, "ignored_layers": ["down_proj"]}, r"'ignored_layers' names 'down_proj'"),
    ],
)
def test_unsupported_quantization_is_refused_by_name(quantization: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"config field .*{message}"):
        read(quantization)


def test_quantization_that_the_part_for_texts_describes_is_read() -> None:
    text = {name: value for name, value in LLAMA.items() if name != "architectures"}
    base = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    images = ["vision_tower", "model.vision_tower.vision_model.encoder", "lm_head"]
    stated = {**BLOCK, "modules_to_not_convert": images}
    of_text = {**base, "text_config": {**text, "quantization_config": stated}}
    for config in ({**base, "quantization_config": stated}, of_text):
        assert read_architecture(config).fp8 == "block"  # type: ignore[attr-defined]
    for name in ("model.language_model.layers.1.mlp", "language_model.model.layers.1.mlp"):
        stated = {**BLOCK, "modules_to_not_convert": [name]}
        with pytest.raises(ValueError, match=rf"names '{name}', so that model\.layers\.1\.mlp\.gate_proj would not"):
            read_architecture({**base, "text_config": {**text, "quantization_config": stated}})


@pytest.mark.parametrize(
    ("base", "quantization", "message"),
    [
        (GPT2, FP8, "'fp8'.* not for GPT2LMHeadModel"),
        (OTHER, FP8, "'fp8'.* not for OtherForCausalLM"),
        (OTHER, {"quant_method": "mxfp4"}, "quantization_config.*'mxfp4'"),
    ],
    ids=["GPT-2, FP8", "other, FP8", "other, MXFP4"],
)
def test_quantized_checkpoint_of_another_model_is_refused_by_name(
    base: dict[str, Any], quantization: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read(quantization, base)


def make_config(tmp_path: Any, **options: Any) -> VllmConfig:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return AsyncEngineArgs(
        str(tmp_path), load_format="dummy", skip_tokenizer_init=True, **options
    ).create_engine_config()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quantization": "fp8"}, "the weights of .*"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype='fp8'"),
        ({"quantization": "fp8", "kv_cache_dtype": "fp8"}, "the weights of .* and kv_cache_dtype='fp8'"),
    ],
)
def test_gpu_without_8_bit_floats_is_refused_by_name(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    config = make_config(tmp_path, **options)
    with pytest.raises(ValueError, match=rf"^{words}: .* 8\.9 or above, and Some GPU has 8\.6; "):
        check_float8(config, torch.device("cuda"))
    check_float8(make_config(tmp_path), torch.device("cuda"))
    for capability in ((8, 9), (9, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, at=capability: at)
        check_float8(config, torch.device("cuda"))


def test_cpu_computes_8_bit_floats_and_warns_that_it_is_slow(tmp_path: Any, caplog: Any) -> None:
    check_float8(make_config(tmp_path), torch.device("cpu"))
    assert not caplog.records
    check_float8(make_config(tmp_path, quantization="fp8"), torch.device("cpu"))
    assert "slow" in caplog.text


def test_gpu_is_refused_a_cache_of_8_bit_integers_with_the_remedy(tmp_path: Any) -> None:
    config = make_config(tmp_path, kv_cache_dtype="int8")
    with pytest.raises(ValueError, match=r"^kv_cache_dtype='int8' .*CPUs only.*; set kv_cache_dtype='fp8'"):
        check_int8_cache(config, torch.device("cuda"))
    check_int8_cache(config, torch.device("cpu"))
    check_int8_cache(make_config(tmp_path, kv_cache_dtype="fp8"), torch.device("cuda"))
