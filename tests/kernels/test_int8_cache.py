"""The KV cache in 8 bits: its cells, and what every build of the C++ kernels computes over it, beside the reference."""

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from support.covering import covering
from support.key_groups import cells_in_groups, cells_in_order
from support.paged_batch import DECODES_EVEN, DECODES_RAGGED, IMAGES, MIXED, PREFILLS, WITH_IMAGES, PagedBatch
from transformers import Gemma2Config, LlamaConfig, Qwen3Config

from vllm_mp.core.models import build_model
from vllm_mp.core.weights.dummy import fill_with_dummy_weights
from vllm_mp.kernels import int8_cache, ops, reference
from vllm_mp.kernels.cpu.decoder import FusedDecoder
from vllm_mp.model_config.families.registry import read_architecture
from vllm_mp.testing.attention_steps import paged_metadata

LONG = [(1, 1500), (1, 513), (300, 1200), (5, 600)]
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 8e-3}
"""The greatest error, relative to the largest value."""
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def in_cells(cache):
    """Return the float `cache` [num_blocks, block_size, heads, dim] in 8 bits, without `write_kv`."""
    return int8_cache.to_cells(cache.flatten(0, 1)).unflatten(0, cache.shape[:2])


def round_to_8_bits(batch):
    """Return the caches of `batch` in 8 bits; give `batch` the values that they stand for."""
    caches = [in_cells(cache) for cache in (batch.k_cache, batch.v_cache)]
    batch.k_cache, batch.v_cache = (int8_cache.from_cells(cache, torch.float32) for cache in caches)
    return caches


def test_cell_holds_each_head_to_a_half_of_its_scale():
    x = torch.randn(50, 3, 64) * torch.logspace(-30, 30, 50)[:, None, None]
    restored = int8_cache.from_cells(int8_cache.to_cells(x), torch.float32)
    scale = x.abs().amax(-1, keepdim=True) / 127
    assert ((restored - x).abs() <= scale * 0.5001).all()
    assert (restored.abs().amax(-1) == x.abs().amax(-1)).float().mean() > 0.5


def test_head_with_an_element_that_is_not_finite_becomes_nan_and_zeros_stay_zeros():
    x = torch.randn(4, 2, 8)
    x[0, 1, 3], x[1, 0, 2], x[2, 0] = math.inf, math.nan, 0.0
    x[3, 1] = 1e-40
    restored = int8_cache.from_cells(int8_cache.to_cells(x), torch.float32)
    assert restored[0, 1].isnan().all()
    assert restored[1, 0].isnan().all()
    assert not restored[2, 0].any()
    assert not restored[3, 1].any()
    assert restored.isnan().sum() == 16


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "head_dim", "block_size", "value_dim", "window", "soft_cap", "dtype"),
    covering(
        [DECODES_EVEN, DECODES_RAGGED, PREFILLS, MIXED, LONG],
        [(9, 3, 64, 16, 64), (4, 4, 40, 4, 40), (8, 1, 128, 16, 128), (4, 2, 66, 8, 96), (2, 1, 256, 32, 256)],
        [None, 7, 600],
        [None, 5.0],
        [*TOLERANCE],
    ),
    ids=str,
)
def test_attention_agrees_with_the_reference(
    build, dtype, rows, heads, kv_heads, head_dim, block_size, value_dim, window, soft_cap
):
    batch = PagedBatch(list(rows), heads, kv_heads, head_dim, block_size, value_dim)
    caches = round_to_8_bits(batch)
    q = batch.q.to(dtype)
    expected = reference.paged_attention(
        q.float(), batch.k_cache, batch.v_cache, batch.metadata, 0.11, window, soft_cap
    )
    got = ops.paged_attention(q, *caches, batch.metadata, 0.11, window, soft_cap)
    assert got.dtype == dtype
    assert (got - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
    of_torch = reference.paged_attention(q.float(), *caches, batch.metadata, 0.11, window, soft_cap)
    assert torch.equal(of_torch, expected)


@DTYPES
def test_tokens_of_an_image_see_one_another(build, dtype):
    batch = PagedBatch(WITH_IMAGES, 6, 2, 64, 16, images=IMAGES)
    caches = round_to_8_bits(batch)
    q = batch.q.to(dtype)
    expected = reference.paged_attention(q.float(), batch.k_cache, batch.v_cache, batch.metadata, 0.11)
    got = ops.paged_attention(q, *caches, batch.metadata, 0.11)
    assert (got - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


@DTYPES
def test_nan_reaches_only_the_queries_that_see_it(build, dtype):
    batch = PagedBatch([(1, 40), (60, 100), (3, 9)], 4, 2, 64, 16)
    q, metadata = batch.q.to(dtype), batch.metadata._replace(isolates=True)
    expected = ops.paged_attention(q, *map(in_cells, (batch.k_cache, batch.v_cache)), metadata, 0.125)
    assert expected.isfinite().all()
    batch.v_cache.flatten(0, 1)[metadata.cell_mapping[1 + 20]] = torch.nan
    got = ops.paged_attention(q, *map(in_cells, (batch.k_cache, batch.v_cache)), metadata, 0.125)
    seeing = torch.zeros(len(got), dtype=torch.bool)
    seeing[1 + 20 : 1 + 60] = True
    assert got[seeing].isnan().all()
    assert torch.equal(got[~seeing], expected[~seeing])


SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "odd-heads": LlamaConfig(**{**SIZES, "hidden_size": 90, "num_attention_heads": 5, "num_key_value_heads": 1}),
    "qwen3": Qwen3Config(**SIZES, head_dim=64),
    "gemma2": Gemma2Config(**SIZES, head_dim=32, sliding_window=9, attn_logit_softcapping=2.0),
}


def models_of(name, dtype):
    """Return the architecture, and a random model as modules and as a fused decoder."""
    config = CONFIGS[name]
    arch = read_architecture({**config.to_dict(), "architectures": [type(config).__name__[:-6] + "ForCausalLM"]})
    modules = build_model(arch, dtype, "cpu")
    fill_with_dummy_weights(modules, 0)
    with torch.no_grad():
        for parameter in modules.parameters():
            parameter.mul_(4) if parameter.dim() == 2 else parameter.add_(torch.randn_like(parameter) / 10)
    fused = copy.deepcopy(modules)
    fused.pack(None, torch.int8)
    assert isinstance(fused.decoder, FusedDecoder)
    return arch, modules, fused


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in CONFIGS), ("llama", torch.bfloat16)])
@pytest.mark.parametrize("block_size", [32, 18])
def test_fused_decoder_writes_and_reads_what_its_modules_do(build, name, dtype, block_size, monkeypatch):
    arch, modules, fused = models_of(name, dtype)
    batch = PagedBatch(MIXED, arch.num_heads, arch.num_kv_heads, arch.head_dim, block_size)
    caches = [tuple(in_cells(torch.randn(batch.k_cache.shape)) for _ in range(2)) for _ in range(arch.num_layers)]
    grouped = [
        tuple(cells_in_groups(cells, build, are_keys=i == 0) for i, cells in enumerate(layer)) for layer in caches
    ]
    positions = torch.cat([torch.arange(context - count, context) for count, context in MIXED])
    ids = torch.arange(len(positions)) % 100
    with torch.inference_mode():
        got = fused(ids, positions, grouped, batch.metadata).float()
        with monkeypatch.context() as patch:
            patch.setattr(ops, "library", lambda: None)
            expected = modules(ids, positions, caches, batch.metadata).float()
    # The least difference may round an element to the next integer.
    assert (got - expected).norm() <= (0.03 if dtype == torch.bfloat16 else 3e-3) * expected.norm()
    for i, cells in itertools.product(range(2), [0, -1]):
        of_fused = cells_in_order(grouped[cells][i], build, are_keys=i == 0)
        differences = [int8_cache.from_cells(each, torch.float32) for each in (of_fused, caches[cells][i])]
        assert (differences[0] - differences[1]).norm() <= 0.02 * differences[1].norm()
        if cells == 0:
            assert (of_fused != caches[cells][i]).float().mean() < 0.01


@DTYPES
def test_fused_decoder_is_batch_invariant_and_the_same_in_any_chunk(build, dtype):
    arch, _, fused = models_of("qwen3", dtype)
    prompts = [torch.randint(100, (length,)) for length in (600, 40)]
    blocks_per_row = 38
    tables = [list(range(row, 2 * blocks_per_row, 2)) for row in range(2)]

    def empty_caches():
        shapes = int8_cache.stored_shapes(arch.kv_shapes, torch.int8)
        return [
            tuple(torch.full((2 * blocks_per_row, 16, *shape), -1, dtype=torch.int8) for shape in layer)
            for layer in shapes
        ]

    def run(caches, spans):
        """Compute positions [first, last) of the rows in one step."""
        rows = [(last - first, last) for _, first, last in spans]
        metadata = paged_metadata(rows, [tables[row] for row, _, _ in spans], 16, "cpu")
        ids = torch.cat([prompts[row][first:last] for row, first, last in spans])
        positions = torch.cat([torch.arange(first, last) for _, first, last in spans])
        with torch.inference_mode():
            return fused(ids, positions, caches, metadata)

    together = run(empty_caches(), [(1, 0, 40), (0, 0, 600)])[40:]
    caches = empty_caches()
    chunks = [0, 1, 2, 100, 163, 510, 511, 512, 599, 600]
    alone = torch.cat([run(caches, [(0, first, last)]) for first, last in itertools.pairwise(chunks)])
    assert torch.equal(alone, together)
