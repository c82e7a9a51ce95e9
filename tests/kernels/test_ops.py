"""The torch operations against naive arithmetic and against transformers."""

import itertools

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from vllm_mp.architecture import ACTIVATIONS as SUPPORTED_ACTIVATIONS
from vllm_mp.kernels import ops, reference
from vllm_mp.kernels.ops import AttentionMetadata

# (query tokens, context) of each row, single-token rows first.
DECODES_EVEN = [(1, 9), (1, 9), (1, 9)]
DECODES_RAGGED = [(1, 1), (1, 70), (1, 3), (1, 17), (1, 16)]
PREFILLS = [(5, 5), (20, 33), (16, 16)]
MIXED = [(1, 40), (1, 2), (7, 7), (3, 50)]


class PagedBatch:
    """Rows with random contexts, scattered over the blocks of a cache that is otherwise NaN."""

    def __init__(
        self,
        rows: list[tuple[int, int]],
        heads: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        value_dim: int | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        value_dim = value_dim or head_dim
        self.rows = rows
        blocks_per_row = [-(-context // block_size) for _, context in rows]
        num_blocks = sum(blocks_per_row) + 3
        shuffled = iter(torch.randperm(num_blocks, generator=generator).tolist())
        tables = [list(itertools.islice(shuffled, count)) for count in blocks_per_row]
        width = max(blocks_per_row) + 1
        self.q = torch.randn(sum(q for q, _ in rows), heads, head_dim, generator=generator)
        self.keys = [torch.randn(context, kv_heads, head_dim, generator=generator) for _, context in rows]
        self.values = [torch.randn(context, kv_heads, value_dim, generator=generator) for _, context in rows]
        self.k_cache = torch.full((num_blocks, block_size, kv_heads, head_dim), float("nan"))
        self.v_cache = torch.full((num_blocks, block_size, kv_heads, value_dim), float("nan"))
        slots = [
            [table[p // block_size] * block_size + p % block_size for p in range(context)]
            for table, (_, context) in zip(tables, rows, strict=True)
        ]
        for row_slots, k, v in zip(slots, self.keys, self.values, strict=True):
            ops.write_kv(k, v, self.k_cache, self.v_cache, torch.tensor(row_slots))
        self.metadata = AttentionMetadata(
            query_start=torch.tensor([0, *itertools.accumulate(q for q, _ in rows)], dtype=torch.int32),
            seq_lens=torch.tensor([context for _, context in rows], dtype=torch.int32),
            block_table=torch.tensor([t + [10**6] * (width - len(t)) for t in tables], dtype=torch.int32),
            slot_mapping=torch.tensor([s for row, (q, _) in zip(slots, rows, strict=True) for s in row[-q:]]),
            query_lens=[q for q, _ in rows],
            host_seq_lens=[context for _, context in rows],
            num_decodes=sum(q == 1 for q, _ in rows),
            max_seq_len=max(context for _, context in rows),
        )

    def expected(self, scale: float, window: int | None, soft_cap: float | None) -> Tensor:
        """Attention one query and one head at a time."""
        out = []
        queries = iter(self.q)
        for (count, context), k, v in zip(self.rows, self.keys, self.values, strict=True):
            for position in range(context - count, context):
                q = next(queries)
                first = max(0, position - window + 1) if window else 0
                for_heads = []
                for head in range(q.shape[0]):
                    shared = head // (q.shape[0] // k.shape[1])
                    scores = k[first : position + 1, shared] @ q[head] * scale
                    if soft_cap:
                        scores = soft_cap * torch.tanh(scores / soft_cap)
                    for_heads.append(torch.softmax(scores, 0) @ v[first : position + 1, shared])
                out.append(torch.stack(for_heads))
        return torch.stack(out)


@pytest.mark.parametrize("rows", [DECODES_EVEN, DECODES_RAGGED, PREFILLS, MIXED, [(1, 37)], [(1, 1)]])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (9, 3), (4, 1)])
@pytest.mark.parametrize(("head_dim", "block_size"), [(16, 16), (80, 4), (64, 1)])
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (5, None), (16, None), (None, 3.0), (5, 3.0)])
def test_paged_attention_equals_dense_attention(
    rows: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    soft_cap: float | None,
) -> None:
    batch = PagedBatch(rows, heads, kv_heads, head_dim, block_size)
    scale = head_dim**-0.5
    got = ops.paged_attention(batch.q, batch.k_cache, batch.v_cache, batch.metadata, scale, window, soft_cap)
    torch.testing.assert_close(got, batch.expected(scale, window, soft_cap), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("rows", [DECODES_RAGGED, MIXED, [(1, 37)]])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_values_may_have_another_size_than_keys(rows: list[tuple[int, int]], soft_cap: float | None) -> None:
    batch = PagedBatch(rows, 4, 2, 24, 8, value_dim=16)
    got = ops.paged_attention(batch.q, batch.k_cache, batch.v_cache, batch.metadata, 0.2, 9, soft_cap)
    torch.testing.assert_close(got, batch.expected(0.2, 9, soft_cap), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (5, None), (None, 3.0)])
def test_a_token_that_is_not_finite_is_kept_from_those_before_it(
    cache: str, window: int | None, soft_cap: float | None
) -> None:
    batch = PagedBatch([(1, 9), (20, 20), (20, 33)], 6, 2, 16, 8)
    expected = batch.expected(0.25, window, soft_cap)
    for first in (1, 21):
        getattr(batch, cache).view(-1, 2, 16)[batch.metadata.slot_mapping[first + 12]] = torch.nan
    metadata = batch.metadata._replace(isolates=True)
    got = ops.paged_attention(batch.q, batch.k_cache, batch.v_cache, metadata, 0.25, window, soft_cap)
    for rows in (slice(0, 13), slice(21, 33)):
        torch.testing.assert_close(got[rows], expected[rows], atol=2e-5, rtol=1e-4)
    assert got[[13, 33]].isnan().flatten(1).any(1).all()


def test_paged_attention_splits_what_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "MAX_GATHERED_TOKENS", 40)
    monkeypatch.setattr(reference, "MAX_MASK_ELEMENTS", 100)
    batch = PagedBatch([*DECODES_RAGGED, *PREFILLS], 4, 2, 16, 8)
    got = ops.paged_attention(batch.q, batch.k_cache, batch.v_cache, batch.metadata, 0.25)
    torch.testing.assert_close(got, batch.expected(0.25, None, None), atol=2e-5, rtol=1e-4)


def test_gathered_context_of_uneven_decodes_stays_near_its_real_size() -> None:
    lens = [20_000, *[10] * 200, 30_000, *[12] * 200]
    groups = list(reference._decode_groups(lens, None))
    padded = sum((last - first) * max(lens[first:last]) for first, last in groups)
    assert [row for first, last in groups for row in range(first, last)] == list(range(len(lens)))
    assert padded <= 2 * sum(lens)
    assert len(groups) <= 4


def test_write_kv_fills_the_named_slots_and_no_other() -> None:
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    k_cache, v_cache = torch.zeros(4, 4, 2, 8), torch.zeros(4, 4, 2, 8)
    ops.write_kv(k, v, k_cache, v_cache, torch.tensor([9, 0, 14]))
    assert torch.equal(k_cache.view(16, 2, 8)[[9, 0, 14]], k)
    assert torch.equal(v_cache.view(16, 2, 8)[[9, 0, 14]], v)
    untouched = [slot for slot in range(16) if slot not in (9, 0, 14)]
    assert not k_cache.view(16, 2, 8)[untouched].any()
    assert not v_cache.view(16, 2, 8)[untouched].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_rounds_where_transformers_rounds(dtype: torch.dtype) -> None:
    theirs = LlamaRMSNorm(96, eps=1e-5).to(dtype)
    torch.nn.init.normal_(theirs.weight, mean=1.0, std=0.3)
    x = (torch.randn(50, 96) * 3).to(dtype)
    got, expected = ops.rms_norm(x, theirs.weight, 1e-5), theirs(x)
    assert got.dtype == dtype
    # The float32 statistics may differ in their last bit, which now and then turns one rounding.
    assert (got != expected).float().mean() < (0.01 if dtype != torch.float32 else 1.0)
    torch.testing.assert_close(got, expected)


def test_add_rms_norm_returns_the_norm_of_the_sum_and_the_sum() -> None:
    x, residual, weight = torch.randn(4, 32), torch.randn(4, 32), torch.rand(32)
    normed, total = ops.add_rms_norm(x, residual.clone(), weight, 1e-6)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, ops.rms_norm(x + residual, weight, 1e-6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_equals_transformers(dtype: torch.dtype) -> None:
    positions = torch.tensor([3, 0, 49, 7])
    angles = torch.arange(50).float()[:, None] / 10_000.0 ** (torch.arange(0, 32, 2) / 32)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    q, k = torch.randn(4, 6, 32).to(dtype), torch.randn(4, 2, 32).to(dtype)
    full = [torch.cat((half, half), -1)[positions] for half in (cos, sin)]
    expected = apply_rotary_pos_emb(q, k, *full, unsqueeze_dim=1)
    got = ops.rotary(q.clone(), k.clone(), positions, torch.cat((cos, sin), -1))
    torch.testing.assert_close(got, expected)


def test_layer_norm_equals_its_definition() -> None:
    x, weight, bias = torch.randn(5, 24) * 4, torch.randn(24), torch.randn(24)
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias
    torch.testing.assert_close(ops.layer_norm(x, weight, bias, 1e-5), expected)


@pytest.mark.parametrize("name", SUPPORTED_ACTIVATIONS)
def test_activation_equals_the_one_transformers_has_under_its_name(name: str) -> None:
    x = torch.randn(400) * 3
    torch.testing.assert_close(ops.ACTIVATIONS[name](x), ACT2FN[name](x))


def test_silu_and_mul_gates_the_second_half_with_the_first() -> None:
    x = torch.randn(3, 20)
    gate, up = x[:, :10], x[:, 10:]
    torch.testing.assert_close(ops.silu_and_mul(x), gate / (1 + torch.exp(-gate)) * up)
