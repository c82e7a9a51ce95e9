"""The parts of a checkpoint's tensors that ranks hold: together they are the whole, in every form of weights."""

import msgspec
import pytest
import torch

from vllm_mp.core.weights.cuts import cut_factors, cut_tensors
from vllm_mp.kernels.ops import BLOCK_TYPES, BlockWeight, Factors, quantize_blocks
from vllm_mp.model_config.families.registry import read_architecture
from vllm_mp.model_config.tensor_parallel import shard_of
from vllm_mp.testing.random_models import CONFIGS

LAYER = "model.layers.1."
LLAMA = msgspec.structs.replace(
    read_architecture(CONFIGS["llama"].to_dict() | {"architectures": ["LlamaForCausalLM"]}), num_heads=8
)
GPT2 = msgspec.structs.replace(
    read_architecture(CONFIGS["gpt2"].to_dict() | {"architectures": ["GPT2LMHeadModel"]}), num_heads=8, num_kv_heads=8
)


def parts(name, tensor, size, arch=LLAMA):
    """Return the part of each rank."""
    return [dict(cut_tensors([(name, tensor)], shard_of(arch, rank, size).shard))[name] for rank in range(size)]


@pytest.mark.parametrize(
    ("name", "shape", "dimension"),
    [
        ("self_attn.q_proj.weight", (64, 48), 0),
        ("self_attn.q_proj.bias", (64,), 0),
        ("self_attn.o_proj.weight", (48, 64), 1),
        ("mlp.gate_proj.weight", (80, 48), 0),
        ("mlp.experts.3.up_proj.weight", (24, 48), 0),
        ("mlp.experts.3.down_proj.weight", (48, 24), 1),
        ("mlp.shared_expert.down_proj.weight", (48, 40), 1),
    ],
)
@pytest.mark.parametrize("size", [2, 4])
def test_parts_of_ranks_are_the_whole(name, shape, dimension, size):
    tensor = torch.randn(shape)
    found = parts(LAYER + name, tensor, size)
    assert {part.shape[dimension] for part in found} == {shape[dimension] // size}
    assert torch.equal(torch.cat(found, dimension), tensor)
    assert all(part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for part in found), "no copies"


def test_ranks_share_heads_of_keys_and_values():
    keys = torch.randn(16, 48)
    found = parts(f"{LAYER}self_attn.k_proj.weight", keys, 4)
    assert all(torch.equal(part, keys[rank // 2 * 8 :][:8]) for rank, part in enumerate(found))


def test_fused_projections_are_cut_part_by_part():
    q, k, v = torch.randn(64, 48), torch.randn(16, 48), torch.randn(16, 48)
    for rank, part in enumerate(parts(f"{LAYER}self_attn.qkv_proj.weight", torch.cat((q, k, v)), 2)):
        rows, few = slice(32 * rank, 32 * rank + 32), slice(8 * rank, 8 * rank + 8)
        assert torch.equal(part, torch.cat((q[rows], k[few], v[few])))
    gate, up = torch.randn(80, 48), torch.randn(80, 48)
    for rank, part in enumerate(parts(f"{LAYER}mlp.gate_up_proj.weight", torch.cat((gate, up)), 2)):
        rows = slice(40 * rank, 40 * rank + 40)
        assert torch.equal(part, torch.cat((gate[rows], up[rows])))


def test_transposed_weights_are_cut_by_the_other_dimension():
    fused = torch.randn(48, 192)
    q, k, v = fused.split(64, 1)
    for rank, part in enumerate(parts("transformer.h.0.attn.c_attn.weight", fused, 2, GPT2)):
        columns = slice(32 * rank, 32 * rank + 32)
        assert torch.equal(part, torch.cat((q[:, columns], k[:, columns], v[:, columns]), 1))
    down = torch.randn(192, 48)
    assert torch.equal(torch.cat(parts("transformer.h.0.mlp.c_proj.weight", down, 4, GPT2)), down)


def test_rank_0_alone_adds_the_bias_of_a_sum():
    bias = torch.randn(48)
    first, *others = parts(f"{LAYER}mlp.down_proj.bias", bias, 4)
    assert torch.equal(first, bias)
    assert not any(part.any() for part in others)


@pytest.mark.parametrize(
    "name",
    [f"{LAYER}input_layernorm.weight", f"{LAYER}mlp.gate.weight", f"{LAYER}self_attn.q_norm.weight", "norm.weight"],
)
def test_every_rank_holds_norms_and_routers_whole(name):
    tensor = torch.randn(8, 48)
    assert all(part is tensor for part in parts(name, tensor, 2))


def test_last_rank_may_have_fewer_tokens():
    embedding = torch.randn(97, 48)
    found = parts("model.embed_tokens.weight", embedding, 4)
    assert [len(part) for part in found] == [25, 25, 25, 22]
    assert torch.equal(torch.cat(found), embedding)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q4_K", "Q6_K"])
def test_weights_in_blocks_are_cut_between_blocks(kind):
    weight = quantize_blocks(torch.randn(32, 1024), BLOCK_TYPES[kind])
    for name, dimension in (("mlp.up_proj", 0), ("mlp.down_proj", 1)):
        found = parts(f"{LAYER}{name}.weight", weight, 4)
        assert all(isinstance(part, BlockWeight) for part in found)
        assert torch.equal(torch.cat([part.dequantized() for part in found], dimension), weight.dequantized())


def test_cut_through_a_block_is_refused_by_name():
    weight = quantize_blocks(torch.randn(32, 256), BLOCK_TYPES["Q4_K"])
    with pytest.raises(
        ValueError,
        match=r"layers.1.mlp.down_proj.weight in Q4_K has blocks of 256 .* lower tensor_parallel",
    ):
        parts(f"{LAYER}mlp.down_proj.weight", weight, 2)


def test_scales_of_8_bit_floats_follow_their_weights():
    scale = torch.randn(4, 8)
    assert torch.equal(torch.cat(parts(f"{LAYER}mlp.up_proj.weight_scale_inv", scale, 2)), scale)
    assert torch.equal(torch.cat(parts(f"{LAYER}mlp.down_proj.weight_scale_inv", scale, 2), 1), scale)
    single = torch.tensor(3.0)
    assert all(part is single for part in parts(f"{LAYER}mlp.up_proj.weight_scale", single, 2))
    with pytest.raises(ValueError, match="a part of a group of 128 weights"):
        parts(f"{LAYER}mlp.up_proj.weight_scale_inv", torch.randn(3, 8), 2)


@pytest.mark.parametrize("name", ["self_attn.q_proj", "self_attn.o_proj"])
def test_products_of_the_parts_of_an_adapter_are_the_product_of_the_whole(name):
    inputs, outputs = (48, 64) if name.endswith("q_proj") else (64, 48)
    whole, x = Factors(torch.randn(4, inputs), torch.randn(outputs, 4)), torch.randn(3, inputs)
    shards = [shard_of(LLAMA, rank, 4).shard for rank in range(4)]
    found = [cut_factors(f"layers.0.{name}", whole, shard) for shard in shards]
    if name.endswith("q_proj"):
        product = torch.cat([x @ part.a.T @ part.b.T for part in found], 1)
    else:
        pieces = zip(found, x.chunk(4, 1), strict=True)
        product = sum(piece @ part.a.T @ part.b.T for part, piece in pieces)
    torch.testing.assert_close(product, x @ whole.a.T @ whole.b.T)
    assert cut_factors("layers.0.self_attn.q_proj", None, shards[0]) is None
