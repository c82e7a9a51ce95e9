"""Weights in 8-bit floats: FP8 checkpoints keep theirs, other checkpoints are quantized while they are read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.float8_reference import in_float8
from support.paged_steps import run_in_chunks
from torch import Tensor
from transformers import GPTNeoXConfig, PreTrainedConfig

from vllm_mp import AsyncEngineArgs
from vllm_mp.core.models.loader import load_model
from vllm_mp.kernels import reference
from vllm_mp.kernels.reference import FLOAT8
from vllm_mp.testing.random_models import CONFIGS, random_prompts, save_random_model

HIDDEN, Q, KV, INNER = 160, 192, 96, 200
"""Sizes that are no multiples of 128."""
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 50,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": Q // 4,
    "max_position_embeddings": 64,
}
SHAPES = {
    "self_attn.q_proj": (Q, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, Q),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
FUSED = {
    "attention.qkv_proj": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attention.o_proj": ["self_attn.o_proj"],
    "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.down_proj": ["mlp.down_proj"],
}
BLOCK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
TENSOR = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def _same_numbers_every_time():
    torch.manual_seed(0)


def blocks_of(shape: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // 128), -(-shape[1] // 128)


def checkpoint(quantization: dict[str, Any]) -> dict[str, Tensor]:
    """Return random tensors of a checkpoint of this kind, with different scales in every part."""
    tensors = {
        "model.embed_tokens.weight": torch.randn(50, HIDDEN),
        "lm_head.weight": torch.randn(50, HIDDEN),
        "model.norm.weight": torch.randn(HIDDEN),
    }
    for layer in range(2):
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{norm}.weight"] = torch.randn(HIDDEN)
        for name, shape in SHAPES.items():
            tensors[f"{at}{name}.weight"] = reference.to_float8(100 * torch.randn(shape))
            if quantization.get("weight_block_size"):
                tensors[f"{at}{name}.weight_scale_inv"] = torch.rand(blocks_of(shape)).bfloat16()
            else:
                tensors[f"{at}{name}.weight_scale"] = torch.rand(())
                tensors[f"{at}{name}.input_scale"] = torch.rand(1)
    return tensors


def dequantized(tensors: dict[str, Tensor], name: str) -> Tensor:
    """Return the weights: element [i, j] times the scale at [i // 128, j // 128], or the only scale."""
    weight = tensors[name + ".weight"].float()
    if name + ".weight_scale" in tensors:
        return weight * tensors[name + ".weight_scale"]
    scale = tensors[name + ".weight_scale_inv"].float()
    rows, columns = (torch.arange(size) // 128 for size in weight.shape)
    return weight * scale[rows[:, None], columns[None, :]]


def load(folder: Path, tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    save_file(tensors, folder / "model.safetensors")
    return load_config(folder, dtype, **config)


def load_config(folder: Path, dtype: torch.dtype, options: dict[str, Any] | None = None, **config: Any) -> Any:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **config}))
    made = AsyncEngineArgs(str(folder), skip_tokenizer_init=True, **(options or {})).create_engine_config()
    assert made.model_config.quantization == "fp8"
    return load_model(made.model_config, dtype, torch.device("cpu"))


def projections(model: Any) -> Any:
    """Yield the checkpoint names and the module of each projection."""
    for i, layer in enumerate(model.decoder.layers):
        for name, parts in FUSED.items():
            yield [f"model.layers.{i}.{part}" for part in parts], layer.get_submodule(name)


@DTYPES
@pytest.mark.parametrize("quantization", [BLOCK, TENSOR], ids=["block", "tensor"])
def test_every_part_of_a_projection_keeps_its_weights_and_scales(
    tmp_path: Path, quantization: dict[str, Any], dtype: torch.dtype
) -> None:
    tensors = checkpoint(quantization)
    model = load(tmp_path, tensors, dtype, quantization_config=quantization)
    assert model.lm_head.forward(torch.eye(HIDDEN, dtype=dtype)).dtype in (dtype, torch.float32)
    for names, module in projections(model):
        assert module.weight.dtype == FLOAT8
        expected = torch.cat([dequantized(tensors, name) for name in names])
        assert torch.equal(reference._scaled(module.weight, module.weight_scale), expected)
        x = torch.randn(3, expected.shape[1]).to(dtype)
        got = module(x)
        assert got.dtype == dtype
        # Activations lose 3 % in 8 bits.
        assert (got.float() - x.float() @ expected.T).norm() < 0.05 * (x.float() @ expected.T).norm()


def test_scales_are_read_under_all_their_names(tmp_path: Path) -> None:
    tensors = checkpoint(TENSOR)
    renamed = {
        name.replace(".weight_scale", ".weight_scale_inv").replace(".input_scale", ".activation_scale"): tensor
        for name, tensor in tensors.items()
    }
    renamed["model.layers.0.self_attn.k_scale"] = torch.tensor(0.5)
    renamed["model.layers.1.self_attn.v_proj.v_scale"] = torch.tensor([3.0])
    model = load(tmp_path, renamed, quantization_config=TENSOR)
    for names, module in projections(model):
        expected = torch.cat([dequantized(tensors, name) for name in names])
        assert torch.equal(reference._scaled(module.weight, module.weight_scale), expected)
    assert [layer.attention.kv_scales for layer in model.decoder.layers] == [[0.5, 1.0], [1.0, 3.0]]


def test_every_mismatch_is_named(tmp_path: Path) -> None:
    at = "model.layers.1.self_attn."
    tensors = checkpoint(BLOCK)
    del tensors[at + "k_proj.weight_scale_inv"]
    tensors[at + "q_proj.weight_scale_inv"] = torch.ones(1, 2)
    tensors[at + "v_proj.weight"] = torch.ones(KV, HIDDEN)
    with pytest.raises(ValueError) as caught:
        load(tmp_path, tensors, quantization_config=BLOCK)
    message = str(caught.value)
    assert "missing layers.1.self_attn.k_proj.weight_scale_inv" in message
    assert f"{at}q_proj.weight_scale_inv has shape [1, 2], not [2, 2]" in message
    assert f"{at}v_proj.weight has dtype torch.float32, not torch.float8_e4m3fn" in message
    tensors = checkpoint(TENSOR)
    del tensors[at + "k_proj.weight_scale"]
    tensors["model.layers.0.self_attn.k_scale"] = torch.tensor(0.0)
    with pytest.raises(ValueError, match=r"a layer's scale of keys or values is 0\.0"):
        load(tmp_path, tensors, quantization_config=TENSOR)
    del tensors["model.layers.0.self_attn.k_scale"]
    with pytest.raises(ValueError, match=r"missing layers\.1\.self_attn\.k_proj\.weight_scale\b"):
        load(tmp_path, tensors, quantization_config=TENSOR)


def test_float_checkpoint_is_quantized_output_by_output(tmp_path: Path) -> None:
    tensors = {name: x.float() for name, x in checkpoint(BLOCK).items() if not name.endswith("_inv")}
    model = load(tmp_path, tensors, options={"quantization": "fp8"})
    for names, module in projections(model):
        exact = torch.cat([tensors[name + ".weight"] for name in names])
        highest = module.weight.float().abs().amax(1)
        assert torch.equal(highest, torch.full_like(highest, 448))
        kept = reference._scaled(module.weight, module.weight_scale)
        assert ((kept - exact).norm(dim=1) < 0.04 * exact.norm(dim=1)).all()
    assert model.embed_tokens.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "config"),
    [({"quantization": "fp8"}, {}), ({}, {"quantization_config": BLOCK}), ({}, {"quantization_config": TENSOR})],
    ids=["made", "block", "tensor"],
)
def test_dummy_8_bit_weights_have_the_usual_deviation(
    tmp_path: Path, options: dict[str, Any], config: dict[str, Any]
) -> None:
    model = load_config(tmp_path, torch.float32, {**options, "load_format": "dummy"}, **config)
    for _, module in projections(model):
        weights = reference._scaled(module.weight, module.weight_scale)
        assert weights.std().item() == pytest.approx(0.02, rel=0.05)
        assert module(torch.ones(2, weights.shape[1])).isfinite().all()
    assert torch.equal(model.decoder.norm, torch.ones(HIDDEN))


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2-windowed", "phi3"])
@pytest.mark.parametrize(("weights", "cache"), [(True, False), (False, True), (True, True)])
def test_model_agrees_with_transformers_with_the_same_roundings(
    name: str, weights: bool, cache: bool, tmp_path: Path
) -> None:
    theirs = in_float8(save_random_model(CONFIGS[name], tmp_path), weights=weights, cache=cache)
    args = AsyncEngineArgs(str(tmp_path), skip_tokenizer_init=True, quantization="fp8" if weights else None)
    cache_dtype = FLOAT8 if cache else torch.float32
    ours = load_model(
        args.create_engine_config().model_config, torch.float32, torch.device("cpu"), cache_dtype=cache_dtype
    )
    prompts = random_prompts((40, 1, 24))
    for prompt, got in zip(prompts, run_in_chunks(ours, prompts, 4, dtype=cache_dtype), strict=True):
        with torch.inference_mode():
            expected = theirs(torch.tensor([prompt])).logits[0]
        # If a value is near the midpoint of two 8-bit floats, its last float32 bit decides.
        assert ((got - expected).norm(dim=-1) < 1e-3 * expected.norm(dim=-1)).float().mean() > 0.9
        assert (got - expected).norm() < 0.02 * expected.norm()


NEOX = GPTNeoXConfig(vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6)


@pytest.mark.parametrize("config", [CONFIGS["gpt2"], NEOX], ids=["gpt2", "by transformers"])
def test_other_models_also_support_an_8_bit_cache(config: PreTrainedConfig, tmp_path: Path) -> None:
    theirs = in_float8(save_random_model(config, tmp_path), weights=False)
    args = AsyncEngineArgs(str(tmp_path), skip_tokenizer_init=True, max_model_len=64).create_engine_config()
    ours = load_model(args.model_config, torch.float32, torch.device("cpu"), cache_dtype=FLOAT8)
    prompts = random_prompts((24, 9))
    for prompt, got in zip(prompts, run_in_chunks(ours, prompts, 4, dtype=FLOAT8), strict=True):
        with torch.inference_mode():
            expected = theirs(torch.tensor([prompt])).logits[0]
        assert (got - expected).norm() < 0.01 * expected.norm()


def test_checkpoint_scales_of_keys_and_values_are_used(tmp_path: Path) -> None:
    theirs = save_random_model(CONFIGS["llama"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(3):
        at = f"model.layers.{layer}.self_attn."
        # Without their scales, keys and values would be far too large for 8-bit floats; the result is the same.
        for part, other, scale in (("k", "q", 2.0**14), ("v", "o", 2.0**12)):
            tensors[f"{at}{part}_scale"] = torch.tensor(scale)
            tensors[f"{at}{part}_proj.weight"] *= scale
            tensors[f"{at}{other}_proj.weight"] /= scale
    save_file(tensors, tmp_path / "model.safetensors")
    args = AsyncEngineArgs(str(tmp_path), skip_tokenizer_init=True).create_engine_config()
    prompts = random_prompts((24,))
    for cache_dtype, reference_model in ((FLOAT8, in_float8(theirs, weights=False)), (torch.float32, theirs)):
        ours = load_model(args.model_config, torch.float32, torch.device("cpu"), cache_dtype=cache_dtype)
        (got,) = run_in_chunks(ours, prompts, 4, dtype=cache_dtype)
        with torch.inference_mode():
            expected = reference_model(torch.tensor(prompts)).logits[0]
        assert (got - expected).norm() < 0.01 * expected.norm()
