"""The Triton kernels compared with kernels/reference.py over many shapes, in the interpreter or on a GPU.

The shapes are small, because the interpreter takes a second for a millisecond of a GPU.
"""

import itertools
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from support.covering import by_turns, covering, extended
from support.gpu_device import DEVICE as GPU_DEVICE
from support.paged_batch import DECODES_RAGGED, IMAGES, MIXED, PREFILLS, WITH_IMAGES, PagedBatch
from support.sampling_logits import EQUAL_TO_REFERENCE, impossible_tokens_at_the_end
from support.token_masks import VOCAB_SIZES, masked_case, same_bits
from support.triton_interpreter import prepare_once_for_each_launch
from vllm_mp.kernels import reference
from vllm_mp.kernels.reference import FLOAT8
from vllm_mp.kernels.sampling import DrawParams
from vllm_mp.kernels.triton import launch, operations

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else GPU_DEVICE
if INTERPRETED:
    prepare_once_for_each_launch()
FLOAT8_HERE = pytest.mark.skipif(
    not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="this GPU has no 8-bit floats",
)

ERRORS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2 if INTERPRETED else 8e-3}
"""The greatest error of a result against float32 with the same inputs, relative to the largest value.

The interpreter truncates to bfloat16; a GPU rounds.
"""
DTYPES = pytest.mark.parametrize("dtype", ERRORS, ids=str)
SWEPT = torch.float32 if INTERPRETED else torch.bfloat16
"""The dtype of the tests over many shapes; for a GPU, float32 products take long to compile."""


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut even short contexts into parts, as the interpreter has no time for long ones, and fix the random numbers."""
    table = launch.table(torch.empty(0, device=DEVICE).device)
    monkeypatch.setitem(table, "splits", {**table["splits"], "TOKENS": 16, "MAX_TOKENS": 32, "ROWS": 2})
    torch.manual_seed(0)


def assert_near(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    got = got.float().cpu()
    assert got.shape == expected.shape
    assert got.isfinite().all()
    assert (got - expected.float()).abs().max() <= ERRORS[dtype] * expected.float().abs().max()


def at(place: str, *values: Any) -> list[Any]:
    """Return `values` with each tensor, also in named tuples, on the device `place`."""
    return [
        type(value)(*at(place, *value))
        if hasattr(value, "_fields")
        else value.to(place)
        if isinstance(value, Tensor)
        else value
        for value in values
    ]


def attend(batch: PagedBatch, dtype: torch.dtype, *options: Any, **changes: Any) -> Tensor:
    q, k_cache, v_cache = (x.to(DEVICE, dtype) for x in (batch.q, batch.k_cache, batch.v_cache))
    return operations.paged_attention(q, k_cache, v_cache, *at(DEVICE, batch.metadata._replace(**changes)), *options)


def attend_by_reference(batch: PagedBatch, *options: Any) -> Tensor:
    return reference.paged_attention(batch.q, batch.k_cache, batch.v_cache, batch.metadata, *options)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "value_dim", "rows", "window", "soft_cap"),
    covering(
        [
            (8, 2, 64, 16, 64),
            (4, 4, 80, 4, 80),
            (6, 1, 96, 24, 96),
            (14, 2, 128, 32, 128),
            (4, 2, 192, 16, 128),
            (3, 1, 256, 1, 256),
            (71, 1, 16, 16, 32),
        ],
        [DECODES_RAGGED, PREFILLS, MIXED],
        [(None, None), (7, None), (20, 3.0)],
        rest_is_extended=True,
    ),
    ids=str,
)
def test_attention_agrees_with_the_reference(
    rows: Any, heads: int, kv_heads: int, head_dim: int, block_size: int, value_dim: int, window: Any, soft_cap: Any
) -> None:
    # Cells that no row wrote are NaN, and table entries past a row's blocks lie far beyond the cache.
    batch = PagedBatch(rows, heads, kv_heads, head_dim, block_size, value_dim)
    batch.round_to(SWEPT)
    expected = attend_by_reference(batch, 0.11, window, soft_cap)
    assert_near(attend(batch, SWEPT, 0.11, window, soft_cap), expected, SWEPT)


@pytest.mark.parametrize("window", [None, 20])
def test_tokens_of_an_image_see_one_another(window: int | None) -> None:
    images = {row: runs for row, runs in IMAGES.items() if row < 4}
    batch = PagedBatch(WITH_IMAGES[:4], 6, 2, 64, 16, images=images)
    batch.round_to(SWEPT)
    expected = attend_by_reference(batch, 0.11, window, None)
    assert_near(attend(batch, SWEPT, 0.11, window, None), expected, SWEPT)


@pytest.mark.parametrize(
    ("dtype", "rows", "head_dim", "window", "soft_cap"),
    covering([*ERRORS], [DECODES_RAGGED, MIXED], [(64, None, None), (128, 20, 3.0)], rest_is_extended=True),
    ids=str,
)
def test_attention_is_accurate_to_its_dtype(dtype: torch.dtype, rows: Any, head_dim: int, window: Any, soft_cap: Any):
    batch = PagedBatch(rows, 6, 2, head_dim, 16)
    batch.round_to(dtype)
    got = attend(batch, dtype, 0.125, window, soft_cap)
    assert got.dtype == dtype
    assert_near(got, attend_by_reference(batch, 0.125, window, soft_cap), dtype)


def attend_in_8_bits(batch: PagedBatch, dtype: torch.dtype, *options: Any) -> tuple[Tensor, Tensor]:
    """Return the attention over a cache of 8-bit floats with queries of `dtype`, and the reference's."""
    batch.round_to(dtype)
    batch.k_cache, batch.v_cache = (reference.to_float8(cache) for cache in (batch.k_cache, batch.v_cache))
    inputs = at(DEVICE, batch.q.to(dtype), batch.k_cache, batch.v_cache, batch.metadata)
    got = operations.paged_attention(*inputs, *options)
    assert got.dtype == dtype
    return got, attend_by_reference(batch, *options)


@FLOAT8_HERE
@pytest.mark.parametrize(
    ("dtype", "rows", "head_dim", "window", "soft_cap"),
    covering(
        [*{SWEPT: 0, torch.float16: 0, torch.bfloat16: 0}],
        [DECODES_RAGGED, MIXED],
        [(64, None, None), (80, 20, 3.0)],
        rest_is_extended=True,
    ),
    ids=str,
)
def test_attention_over_a_cache_of_8_bit_floats(
    dtype: torch.dtype, rows: Any, head_dim: int, window: Any, soft_cap: Any
) -> None:
    got, expected = attend_in_8_bits(PagedBatch(rows, 6, 2, head_dim, 16), dtype, 0.125, window, soft_cap)
    assert_near(got, expected, dtype)


@FLOAT8_HERE
@pytest.mark.parametrize(("rows", "size"), by_turns([DECODES_RAGGED, MIXED], [1e-30, 1e30]), ids=str)
def test_no_query_is_too_large_or_too_small_for_a_cache_of_8_bit_floats(rows: Any, size: float) -> None:
    batch = PagedBatch(rows, 6, 2, 64, 16)
    batch.q, batch.k_cache, batch.v_cache = batch.q * size, batch.k_cache * 200, batch.v_cache * 200
    got, expected = attend_in_8_bits(batch, torch.bfloat16, 6e-4 / size)
    assert_near(got, expected, torch.bfloat16)


@pytest.mark.parametrize(("splits", "window"), [(5, None), (16, 50), *extended((1, None), (2, 50))])
def test_decode_is_the_same_in_any_number_of_parts(splits: int, window: int | None) -> None:
    batch = PagedBatch([(1, 133), (1, 1), (1, 32), (1, 33), (1, 70)], 6, 2, 64, 16)
    expected = attend_by_reference(batch, 0.125, window)
    assert_near(attend(batch, torch.float32, 0.125, window, decode_splits=splits), expected, torch.float32)


@pytest.mark.parametrize("splits", [1, 4])
def test_padding_rows_without_a_context_get_zeros(splits: int) -> None:
    batch = PagedBatch([(1, 40), (1, 9), (1, 21), (1, 3)], 4, 2, 64, 16)
    expected = attend_by_reference(batch, 0.125)
    padding = torch.tensor([False, True, False, True])
    batch.metadata.seq_lens[padding], batch.metadata.block_table[padding] = 0, 10**6
    expected[padding] = 0
    assert_near(attend(batch, torch.float32, 0.125, decode_splits=splits), expected, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_with_one_part_gets_the_same_bits_without_a_merge(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    batch = PagedBatch([(1, 16), (1, 200), (1, 9), (1, 60)], 8, 2, 64, 16)
    batch.round_to(dtype)
    alone = attend(batch, dtype, 0.125, decode_splits=1, max_seq_len=1)  # the host knows that no row has two parts
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **kind: empty(*size, **kind).fill_(torch.nan))
    found = attend(batch, dtype, 0.125, decode_splits=4)  # a merge of what was not written gives NaN
    assert torch.equal(found[[0, 2]], alone[[0, 2]])
    assert_near(found, attend_by_reference(batch, 0.125, None), dtype)


def test_grid_of_a_decode_depends_on_host_values_only() -> None:
    batch = PagedBatch([(1, 40), (1, 9)], 4, 2, 64, 16)
    expected = attend_by_reference(batch, 0.125)
    # As for a captured graph: only the device knows the lengths.
    got = attend(batch, torch.float32, 0.125, query_lens=[], host_seq_lens=[], max_seq_len=4096)
    assert_near(got, expected, torch.float32)


def test_queries_may_be_part_of_a_wider_projection() -> None:
    batch = PagedBatch(MIXED, 4, 2, 64, 16)
    expected = attend_by_reference(batch, 0.125)
    batch.q = torch.cat((batch.q, torch.full((len(batch.q), 4, 64), torch.nan)), 1)[:, :4]
    assert not batch.q.is_contiguous()
    assert_near(attend(batch, torch.float32, 0.125), expected, torch.float32)


@pytest.mark.parametrize(
    ("value", "window", "soft_cap", "of_keys"),
    covering(
        [torch.nan, torch.inf, -torch.inf], [(None, None), (7, None), (20, 3.0)], [True, False], rest_is_extended=True
    ),
    ids=str,
)
def test_nan_and_infinity_reach_only_the_queries_that_see_them(
    value: float, of_keys: bool, window: int | None, soft_cap: float | None
) -> None:
    batch = PagedBatch([(1, 40), (40, 60), (20, 60), (17, 17), (9, 9)], 4, 2, 32, 16)
    # Bad tokens: among the new tokens of a row; in a cached prefix, which leaves the windows; at the start of a row;
    # seen by the last query only.
    for row, position in ((1, 33), (2, 25), (3, 0), (4, 8)):
        kept = (batch.keys if of_keys else batch.values)[row]
        kept[position, 1, 5] = value
        cache = batch.k_cache if of_keys else batch.v_cache
        cache[batch.metadata.block_table[row, position // 16], position % 16] = kept[position]
    expected = batch.expected(0.125, window, soft_cap)
    finite = expected.isfinite().all(-1)
    assert not finite.all() or (of_keys and soft_cap), "a soft cap makes every score finite"
    got = attend(batch, torch.float32, 0.125, window, soft_cap).cpu()
    assert torch.equal(got.isfinite().all(-1), finite)
    assert_near(got[finite], expected[finite], torch.float32)


@FLOAT8_HERE
def test_nan_in_8_bit_values_reaches_only_the_queries_that_see_it() -> None:
    batch = PagedBatch([(1, 40), (30, 50)], 4, 2, 32, 16)
    batch.round_to(SWEPT)
    batch.k_cache, batch.v_cache = (reference.to_float8(cache) for cache in (batch.k_cache, batch.v_cache))
    batch.v_cache.view(torch.uint8).flatten(0, 1)[batch.metadata.cell_mapping[1 + 20], 1, 5] = 0x7F
    metadata = batch.metadata._replace(isolates=True)
    expected = reference.paged_attention(batch.q, batch.k_cache, batch.v_cache, metadata, 0.125)
    inputs = at(DEVICE, batch.q.to(SWEPT), batch.k_cache, batch.v_cache, batch.metadata)
    got = operations.paged_attention(*inputs, 0.125).cpu()
    finite = got.isfinite().all(-1)
    assert torch.equal(finite, expected.isfinite().all(-1))
    assert (~finite).nonzero().tolist() == [[token, head] for token in range(21, 31) for head in (2, 3)]
    assert_near(got[finite], expected[finite], SWEPT)


def results_of_both(operation: str, *inputs: Any) -> "itertools.chain[tuple[Tensor, Tensor]]":
    """Return pairs of each result of an operation: ours, and the reference's in float32."""
    exact = [x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]
    ours = getattr(operations, operation)(*at(DEVICE, *inputs))
    expected = getattr(reference, operation)(*exact)
    results = [result if isinstance(result, tuple) else (result,) for result in (ours, expected)]
    return zip(*results, strict=True)


@DTYPES
@pytest.mark.parametrize("shape", [(5, 960), (3, 48), (2, 4100)])
def test_norms_agree_with_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual = (3 * torch.randn(2, *shape) + 0.5).to(dtype).unbind()
    weight, bias = torch.randn(2, shape[1]).to(dtype).unbind()
    for operation, *inputs in (
        ("rms_norm", x, weight),
        ("add_rms_norm", x, residual, weight),
        ("add_rms_norm", x, residual, torch.randn(shape[1])),
        ("layer_norm", x, weight, bias),
    ):
        # With a usual eps the result would be the same without it.
        for got, expected in results_of_both(operation, *inputs, 0.5):
            assert got.dtype == dtype
            assert_near(got, expected, dtype)


@pytest.mark.parametrize("heads", [3, 16])
def test_norm_of_heads_that_are_part_of_a_projection(heads: int) -> None:
    qkv = torch.randn(5, heads + 4, 80)
    for x in qkv.split((heads, 2, 2), 1):
        for got, expected in results_of_both("rms_norm", x, torch.rand(80), 1e-6):
            assert_near(got, expected, torch.float32)


@pytest.mark.parametrize("weight_dtype", [torch.float16, torch.float32])
def test_norms_round_where_the_reference_rounds(weight_dtype: torch.dtype) -> None:
    x, residual = (torch.randn(2, 40, 512) * 3).half().unbind()
    weight = torch.randn(512).to(weight_dtype)
    got = operations.add_rms_norm(*at(DEVICE, x, residual, weight), 1e-5)
    expected = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(got[1].cpu(), expected[1])
    # The float32 statistics may differ in their last bit, which sometimes changes a rounding.
    assert (got[0].cpu() != expected[0]).float().mean() < 0.01


@DTYPES
@pytest.mark.parametrize("shape", [(5, 200), (3, 2, 70), (1, 2)])
def test_activations_agree_with_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (4 * torch.randn(shape)).to(dtype)
    for operation in ("silu_and_mul", "gelu", "gelu_tanh"):
        for got, expected in results_of_both(operation, x):
            assert got.dtype == dtype
            assert_near(got, expected, dtype)


def test_gate_is_rounded_where_the_reference_rounds_it() -> None:
    x = (3 * torch.randn(20, 800)).half()
    got = operations.silu_and_mul(x.to(DEVICE)).cpu()
    # The gate may differ in its last float32 bit, which sometimes changes a rounding.
    assert (got != reference.silu_and_mul(x)).float().mean() < 0.01


def test_activation_of_half_a_projection() -> None:
    gate = torch.randn(5, 200).chunk(2, -1)[0]
    for got, expected in results_of_both("gelu_tanh", gate):
        assert_near(got, expected, torch.float32)


def rotary_inputs(
    tokens: int, heads: int, kv_heads: int, head_dim: int, value_dim: int, dtype: torch.dtype, rotary_dim: int = 0
) -> Any:
    """Return q, k and v (parts of one projection if their sizes allow), positions, and the table.

    The table is for the first `rotary_dim` elements of a head; 0: for all.
    """
    if value_dim == head_dim:
        q, k, v = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype).split((heads, kv_heads, kv_heads), 1)
    else:
        q, k, v = (
            torch.randn(tokens, n, dim).to(dtype)
            for n, dim in ((heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim))
        )
    rotary_dim = rotary_dim or head_dim
    angles = torch.outer(torch.arange(64.0), 100.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim))
    table = torch.cat((angles.cos(), angles.sin()), -1).to(dtype)
    return q, k, v, torch.randint(0, 64, (tokens,)), table


ROTARY_SHAPES = [
    (6, 2, 8, 8, 8),
    (32, 4, 64, 64, 64),
    (9, 3, 80, 80, 60),
    (4, 2, 192, 128, 128),
    (14, 2, 256, 256, 256),
]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "value_dim", "rotary_dim", "dtype"), by_turns(ROTARY_SHAPES, [*ERRORS]), ids=str
)
def test_rotary_and_cache_writes_agree_with_the_reference(
    heads: int, kv_heads: int, head_dim: int, value_dim: int, rotary_dim: int, dtype: torch.dtype
) -> None:
    q, k, v, positions, table = rotary_inputs(5, heads, kv_heads, head_dim, value_dim, dtype, rotary_dim)
    for got, expected in results_of_both("rotary", q, k, positions, table):
        assert got.dtype == dtype
        assert_near(got, expected, dtype)
    cells = torch.tensor([9, 0, 23, 14, 5])
    shapes = [(6, 4, kv_heads, dim) for dim in (head_dim, value_dim)]
    exact = [torch.zeros(shape) for shape in shapes]
    caches = [torch.zeros(shape, dtype=dtype, device=DEVICE) for shape in shapes]
    expected = reference.rotary_write_kv(*(x.float() for x in (q, k, v)), positions, table.float(), *exact, cells)
    got = operations.rotary_write_kv(*at(DEVICE, q, k, v, positions, table), *caches, cells.to(DEVICE))
    assert_near(got, expected, dtype)
    for cache, kept in zip(caches, exact, strict=True):
        assert_near(cache, kept, dtype)
        assert cache.flatten(2).any(-1).flatten().nonzero().squeeze(1).tolist() == sorted(cells.tolist())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, *([] if INTERPRETED else [torch.bfloat16])], ids=str)
def test_rotary_rounds_where_the_reference_rounds(dtype: torch.dtype) -> None:
    q, k, _, positions, table = rotary_inputs(40, 4, 2, 64, 64, dtype)
    got = operations.rotary(*at(DEVICE, q, k, positions, table))
    for ours, expected in zip(got, reference.rotary(q, k, positions, table), strict=True):
        assert torch.equal(ours.cpu(), expected)


@DTYPES
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (192, 128), (24, 40)])
def test_keys_and_values_are_written_to_their_cells_and_nowhere_else(
    key_dim: int, value_dim: int, dtype: torch.dtype
) -> None:
    # Keys are part of a projection that is laid out head by head; values repeat one head.
    k = torch.randn(2, 3, 5, key_dim).to(dtype)[:, :, 0].transpose(0, 1)
    v = torch.randn(3, 1, value_dim).to(dtype).expand(-1, 2, -1)
    caches = [torch.zeros(4, 4, 2, dim, dtype=dtype) for dim in (key_dim, value_dim)]
    on_device = at(DEVICE, *(cache.clone() for cache in caches))
    cells = torch.tensor([9, 0, 14])
    reference.write_kv(k, v, *caches, cells)
    operations.write_kv(*at(DEVICE, k, v), *on_device, cells.to(DEVICE))
    for got, expected in zip(on_device, caches, strict=True):
        assert torch.equal(got.cpu(), expected)


def float8_edges() -> Tensor:
    """Return numbers [1, n, 8]: all 8-bit floats, midpoints of neighbours, values beyond the largest, and NaN."""
    values = torch.arange(127, dtype=torch.uint8).view(FLOAT8).float()
    between = (values[1:] + values[:-1]) / 2
    beyond = torch.tensor([463.0, 465.0, 1e9, torch.inf, torch.nan, 2.0**-10, 1.01 * 2.0**-10])
    edges = torch.cat((values, between, between * 1.004, beyond))
    edges = torch.cat((edges, -edges))
    return edges[: len(edges) // 8 * 8].view(1, -1, 8)


def as_bits(x: Tensor) -> Tensor:
    """Return the bytes of 8-bit floats, with one byte for every NaN."""
    x = x.cpu()
    return x.view(torch.uint8).masked_fill(x.float().isnan(), 0x7F)


@FLOAT8_HERE
@DTYPES
def test_8_bit_floats_are_rounded_and_saturated_as_by_the_reference(dtype: torch.dtype) -> None:
    heads = float8_edges().to(dtype)
    caches = torch.zeros(2, 2, 1, *heads.shape[1:]).to(FLOAT8).unbind()
    on_device = at(DEVICE, *(cache.clone() for cache in caches))
    cells = torch.tensor([1])
    reference.write_kv(heads, -heads, *caches, cells)
    assert caches[0].float().nan_to_num(0).abs().max() == 448
    operations.write_kv(*at(DEVICE, heads, -heads), *on_device, cells.to(DEVICE))
    for got, expected in zip(on_device, caches, strict=True):
        assert torch.equal(as_bits(got), as_bits(expected))
    table = torch.tensor([[1.0] * 4 + [0.0] * 4]).to(dtype)
    inputs = (heads, heads, heads, torch.tensor([0]), table)
    reference.rotary_write_kv(*inputs, *caches, cells)
    operations.rotary_write_kv(*at(DEVICE, *inputs), *on_device, cells.to(DEVICE))
    for got, expected in zip(on_device, caches, strict=True):
        assert torch.equal(as_bits(got), as_bits(expected))


def test_padding_is_not_written_to_the_cache() -> None:
    q, k, v, positions, table = at(DEVICE, *rotary_inputs(3, 2, 2, 8, 8, torch.float32))
    cells = torch.tensor([-1, 6, -1], device=DEVICE)
    for write in (
        lambda caches: operations.write_kv(k, v, *caches, cells),
        lambda caches: operations.rotary_write_kv(q, k, v, positions, table, *caches, cells),
    ):
        caches = torch.zeros(2, 2, 4, 2, 8, device=DEVICE)
        write(caches.unbind())
        written = caches.flatten(1, 2).flatten(2).any(-1)
        assert written.nonzero().tolist() == [[0, 6], [1, 6]]


def test_operations_accept_zero_tokens() -> None:
    x, weight = torch.empty(0, 64, device=DEVICE), torch.ones(64, device=DEVICE)
    assert operations.rms_norm(x, weight, 1e-5).shape == (0, 64)
    assert operations.layer_norm(x, weight, weight, 1e-5).shape == (0, 64)
    assert operations.silu_and_mul(x).shape == (0, 32)
    slots = torch.empty(0, dtype=torch.int32, device=DEVICE)
    operations.add_adapters(x, x, slots, torch.ones(1, 1, 8, 64, device=DEVICE), weight.repeat(1, 8, 1), (64,))


def test_no_token_mask_leaves_all_logits() -> None:
    logits, masks, rows = at(DEVICE, *masked_case(200, 7, torch.float32))
    expected = logits.clone()
    operations.apply_token_masks(logits, masks[:0], rows[:0])
    assert same_bits(logits, expected)


@DTYPES
@pytest.mark.parametrize(("vocab_size", "num_words"), VOCAB_SIZES)
def test_token_masks_forbid_what_the_reference_forbids(vocab_size: int, num_words: int, dtype: torch.dtype) -> None:
    logits, masks, rows = masked_case(vocab_size, num_words, dtype)
    got, *masks_on_device = at(DEVICE, logits.clone(), masks, rows)
    reference.apply_token_masks(logits, masks, rows)
    operations.apply_token_masks(got, *masks_on_device)
    assert same_bits(got, logits)


@pytest.mark.parametrize(("size", "dtype"), by_turns([1, 63, 64, 200, 1000], [*ERRORS]), ids=str)
def test_argmax_finds_the_first_of_equal_highest_scores(size: int, dtype: torch.dtype) -> None:
    scores = torch.randn(9, size).to(dtype)
    scores[:, size // 2 :] = scores[:, : size - size // 2].clone()  # each occurs twice
    scores[1, size // 2], scores[2, -1], scores[3] = torch.nan, torch.inf, -torch.inf
    scores[4, : size // 2] = -torch.inf
    assert operations.argmax(scores.to(DEVICE)).tolist() == reference.argmax(scores).tolist()


def test_argmax_of_scores_that_are_part_of_a_wider_tensor() -> None:
    scores = torch.randn(4, 300)[:, 7:207]
    assert operations.argmax(scores.to(DEVICE)).tolist() == reference.argmax(scores).tolist()


def on_device(params: DrawParams) -> DrawParams:
    return DrawParams(*at(DEVICE, *params[:-1]), filters=params.filters)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.extended] if case.endswith(("0.2", "0.9")) else [])
        for case in EQUAL_TO_REFERENCE
    ],
)
def test_draws_equal_the_definition(case: str) -> None:
    logits, params = EQUAL_TO_REFERENCE[case]()
    got = operations.sample(logits.to(DEVICE), on_device(params))
    assert got.tolist() == reference.sample(logits, params).tolist()


def test_draw_ends_at_the_last_possible_token_even_if_sums_differ_in_their_last_bit() -> None:
    logits, params = impossible_tokens_at_the_end()
    assert operations.sample(logits.to(DEVICE), on_device(params)).max() < 55
