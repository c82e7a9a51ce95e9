"""The fused decoder with weights in block types, and with rotary embedding of neighbouring elements."""

import pytest
import torch
from support.key_groups import keys_in_order
from support.paged_batch import MIXED, PREFILLS, PagedBatch

from vllm_mp.kernels import ops
from vllm_mp.kernels.block_weight import BLOCK_TYPES, quantize_blocks
from vllm_mp.kernels.cpu import block_linear

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 96, 224, 8, 2, 40
TYPES = {
    "qkv_proj": (("Q4_0", HEADS * HEAD_DIM), ("Q4_0", KV_HEADS * HEAD_DIM), ("Q8_0", KV_HEADS * HEAD_DIM)),
    "o_proj": (("Q5_1", HIDDEN),),
    "gate_up_proj": (("Q4_1", INNER), ("Q5_0", INNER)),
    "down_proj": (("Q8_0", HIDDEN),),
}
INPUTS = {"qkv_proj": HIDDEN, "o_proj": HEADS * HEAD_DIM, "gate_up_proj": HIDDEN, "down_proj": INNER}
SHAPES = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "scale": 0.2, "window": None}
NUM_LAYERS = 2


def random_layer(dtype: torch.dtype) -> tuple[ops.LayerWeights, ops.LayerWeights]:
    """Return a layer in block types, and the same layer dequantized."""
    blocks, tensors = {}, {}
    for name, parts in TYPES.items():
        weights = [
            quantize_blocks(torch.randn(outputs, INPUTS[name]) / INPUTS[name] ** 0.5, BLOCK_TYPES[block_type])
            for block_type, outputs in parts
        ]
        bias = torch.randn(sum(outputs for _, outputs in parts)) / 4
        blocks[name] = (weights, bias)
        tensors[name] = (torch.cat([weight.dequantized() for weight in weights]).to(dtype), bias.to(dtype))
    norms: dict[str, torch.Tensor | None] = {
        name: torch.rand(HIDDEN).add(0.5).to(dtype) for name in ("input_norm", "mlp_norm")
    }
    norms |= {name: torch.rand(HEAD_DIM).add(0.5).to(dtype) for name in ("q_norm", "k_norm")}
    norms |= {"attention_output_norm": None, "mlp_output_norm": None}
    return ops.LayerWeights(**norms, **blocks, **SHAPES), ops.LayerWeights(**norms, **tensors, **SHAPES)


def outputs_of(build, decoders, rows, dtype, adapters=None):
    """Return the hidden states and the first layer's new keys of each decoder for the same step."""
    batch = PagedBatch(rows, HEADS, KV_HEADS, HEAD_DIM, 16)
    caches = [(torch.randn(batch.k_cache.shape).to(dtype), torch.randn(batch.v_cache.shape).to(dtype))] * NUM_LAYERS
    metadata = batch.metadata._replace(adapter_slots=adapters)
    positions = torch.cat([torch.arange(context - count, context) for count, context in rows])
    angles = torch.rand(256, HEAD_DIM // 2) * 6
    cos_sin, x = torch.cat((angles.cos(), angles.sin()), 1).to(dtype), torch.randn(len(positions), HIDDEN).to(dtype)
    results = []
    for decoder in decoders:
        own = [(k.clone(), v.clone()) for k, v in caches]
        results.append(
            (
                decoder(x.clone(), positions, cos_sin[None], own, metadata),
                keys_in_order(own[0][0], build).flatten(0, 1)[metadata.cell_mapping],
            )
        )
    return results


@pytest.mark.parametrize(
    ("dtype", "in_place", "is_batch_invariant"),
    [(torch.float32, "0", True), (torch.float32, "1", True), (torch.bfloat16, "0", True), (torch.bfloat16, "0", False)],
    ids=str,
)
def test_fused_decoder_takes_block_types_that_differ_within_a_layer(
    build, dtype, in_place, is_batch_invariant, monkeypatch
):
    monkeypatch.setenv(block_linear.IN_PLACE_VARIABLE, in_place)
    monkeypatch.setattr(build, "is_batch_invariant", is_batch_invariant)
    layers = [random_layer(dtype) for _ in range(NUM_LAYERS)]
    norm = torch.rand(HIDDEN).add(0.5).to(dtype)
    decoders = [
        ops.fuse_decoder(of_kind, norm, ops.DecoderOptions(dtype, 1e-6)) for of_kind in zip(*layers, strict=True)
    ]
    stacks = [decoder.make_adapter_stacks(2, 4) for decoder in decoders]
    for both in zip(*stacks, strict=True):
        sizes = both[0]._part_sizes
        factors = [
            ops.Factors((torch.randn(4, both[0].interface.inputs) / 8).to(dtype), torch.randn(size, 4).to(dtype) / 8)
            for size in sizes
        ]
        for stack in both:
            stack.load(1, factors)
    for rows in (MIXED, PREFILLS, [(1, 30)]):
        num_tokens = sum(count for count, _ in rows)
        for adapters in (None, torch.randint(-1, 2, (num_tokens,), dtype=torch.int32)):
            for got, expected in zip(*outputs_of(build, decoders, rows, dtype, adapters), strict=True):
                assert (got.float() - expected.float()).norm() <= 0.04 * expected.float().norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_neighbouring_elements_are_rotated_as_halves_of_heads_in_another_order(build, dtype):
    def in_pairs(part, dim):
        """Return `part`, whose dimension `dim` holds heads, in the order in which files in GGUF have them."""
        return part.unflatten(dim, (-1, 2, HEAD_DIM // 2)).transpose(dim + 1, dim + 2).flatten(dim, dim + 2)

    rows = (HEADS + KV_HEADS) * HEAD_DIM
    halves, pairs = [], []
    for _ in range(NUM_LAYERS):
        layer = random_layer(dtype)[1]._replace(q_norm=None, k_norm=None)
        weight, bias = layer.qkv_proj
        halves.append(layer)
        of_pairs = [torch.cat((in_pairs(some[:rows], 0), some[rows:])) for some in (weight, bias)]
        pairs.append(layer._replace(qkv_proj=tuple(of_pairs)))
    norm = torch.ones(HIDDEN).to(dtype)
    options = ops.DecoderOptions(dtype, 1e-6)
    decoders = [
        ops.fuse_decoder(layers, norm, options._replace(rotates_pairs=is_in_pairs))
        for layers, is_in_pairs in ((halves, False), (pairs, True))
    ]
    (hidden, keys), (hidden_of_pairs, keys_of_pairs) = outputs_of(build, decoders, [(30, 30), (7, 7)], dtype)
    bound = 1e-5 if dtype == torch.float32 else 0.02
    assert (hidden_of_pairs - hidden).norm() <= bound * hidden.norm()
    assert (keys_of_pairs - in_pairs(keys, 2)).norm() <= bound * keys.norm()
