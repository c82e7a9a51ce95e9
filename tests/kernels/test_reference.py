"""kernels/reference.py compared with naive arithmetic and with transformers."""

from typing import Any

import pytest
import torch
from support.covering import covering
from support.paged_batch import DECODES_EVEN, DECODES_RAGGED, IMAGES, MIXED, PREFILLS, WITH_IMAGES, PagedBatch
from transformers.activations import ACT2FN
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

from vllm_mp.kernels import ops, reference
from vllm_mp.model_config.config_json import ACTIVATIONS as SUPPORTED_ACTIVATIONS


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "head_dim", "block_size", "window", "soft_cap"),
    covering(
        [DECODES_EVEN, DECODES_RAGGED, PREFILLS, MIXED, [(1, 37)], [(1, 1)]],
        [(4, 4), (6, 2), (9, 3), (4, 1)],
        [(16, 16), (80, 4), (64, 1)],
        [(None, None), (5, None), (16, None), (None, 3.0), (5, 3.0)],
    ),
)
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
    got = reference.paged_attention(batch.q, batch.k_cache, batch.v_cache, batch.metadata, scale, window, soft_cap)
    torch.testing.assert_close(got, batch.expected(scale, window, soft_cap), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (9, None), (20, 3.0)])
def test_tokens_of_an_image_see_one_another(
    window: int | None, soft_cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = PagedBatch(WITH_IMAGES[:4], 2, 1, 16, 8, images={row: IMAGES[row] for row in (1, 2)})
    expected = batch.expected(0.25, window, soft_cap)
    for bound in (reference.MAX_MASK_ELEMENTS, 1000):  # as a whole, and in pieces
        monkeypatch.setattr(reference, "MAX_MASK_ELEMENTS", bound)
        got = reference.paged_attention(batch.q, batch.k_cache, batch.v_cache, batch.metadata, 0.25, window, soft_cap)
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


def test_image_that_is_not_finite_affects_only_itself_and_later_tokens_if_queries_are_isolated() -> None:
    batch = PagedBatch([(1, 9), (70, 70)], 2, 1, 16, 8, images={1: [(3, 20), (30, 65)]})
    expected = batch.expected(0.25, None, None)
    batch.v_cache.flatten(0, 1)[batch.metadata.cell_mapping[1 + 40]] = torch.nan
    metadata = batch.metadata._replace(isolates=True)
    got = reference.paged_attention(batch.q, batch.k_cache, batch.v_cache, metadata, 0.25)
    torch.testing.assert_close(got[:31], expected[:31], atol=2e-5, rtol=1e-4)
    assert got[31:].isnan().all()


@pytest.mark.parametrize("rows", [DECODES_RAGGED, MIXED, [(1, 37)]])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_values_may_have_a_different_size_from_keys(rows: list[tuple[int, int]], soft_cap: float | None) -> None:
    batch = PagedBatch(rows, 4, 2, 24, 8, value_dim=16)
    got = reference.paged_attention(batch.q, batch.k_cache, batch.v_cache, batch.metadata, 0.2, 9, soft_cap)
    torch.testing.assert_close(got, batch.expected(0.2, 9, soft_cap), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (5, None), (None, 3.0)])
def test_later_tokens_that_are_not_finite_do_not_affect_isolated_queries(
    cache: str, window: int | None, soft_cap: float | None
) -> None:
    batch = PagedBatch([(1, 9), (20, 20), (20, 33)], 6, 2, 16, 8)
    expected = batch.expected(0.25, window, soft_cap)
    for first in (1, 21):
        getattr(batch, cache).view(-1, 2, 16)[batch.metadata.cell_mapping[first + 12]] = torch.nan
    metadata = batch.metadata._replace(isolates=True)
    got = reference.paged_attention(batch.q, batch.k_cache, batch.v_cache, metadata, 0.25, window, soft_cap)
    for rows in (slice(0, 13), slice(21, 33)):
        torch.testing.assert_close(got[rows], expected[rows], atol=2e-5, rtol=1e-4)
    assert got[[13, 33]].isnan().flatten(1).any(1).all()


def test_paged_attention_splits_large_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "MAX_GATHERED_TOKENS", 40)
    monkeypatch.setattr(reference, "MAX_MASK_ELEMENTS", 100)
    batch = PagedBatch([*DECODES_RAGGED, *PREFILLS], 4, 2, 16, 8)
    got = reference.paged_attention(batch.q, batch.k_cache, batch.v_cache, batch.metadata, 0.25)
    torch.testing.assert_close(got, batch.expected(0.25, None, None), atol=2e-5, rtol=1e-4)


def test_padding_of_uneven_decodes_is_bounded() -> None:
    lens = [20_000, *[10] * 200, 30_000, *[12] * 200]
    groups = list(reference._decode_groups(lens, None))
    padded = sum((last - first) * max(lens[first:last]) for first, last in groups)
    assert [row for first, last in groups for row in range(first, last)] == list(range(len(lens)))
    assert padded <= 2 * sum(lens)
    assert len(groups) <= 4


def test_write_kv_fills_the_named_cells_and_no_other() -> None:
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    k_cache, v_cache = torch.zeros(4, 4, 2, 8), torch.zeros(4, 4, 2, 8)
    reference.write_kv(k, v, k_cache, v_cache, torch.tensor([9, 0, 14]))
    assert torch.equal(k_cache.view(16, 2, 8)[[9, 0, 14]], k)
    assert torch.equal(v_cache.view(16, 2, 8)[[9, 0, 14]], v)
    untouched = [cell for cell in range(16) if cell not in (9, 0, 14)]
    assert not k_cache.view(16, 2, 8)[untouched].any()
    assert not v_cache.view(16, 2, 8)[untouched].any()


@pytest.mark.parametrize("norm", [LlamaRMSNorm, Olmo2RMSNorm, Gemma3RMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_rounds_where_transformers_rounds(norm: type[Any], dtype: torch.dtype) -> None:
    theirs = norm(96, eps=1e-5).to(dtype)
    torch.nn.init.normal_(theirs.weight, mean=1.0, std=0.3)
    x = (torch.randn(50, 96) * 3).to(dtype)
    weight = theirs.weight if norm is LlamaRMSNorm else theirs.weight.float() + (norm is Gemma3RMSNorm)
    got, expected = reference.rms_norm(x, weight, 1e-5), theirs(x)
    assert got.dtype == dtype
    # The float32 statistics may differ in their last bit, which sometimes changes a rounding.
    assert (got != expected).float().mean() < (0.01 if dtype != torch.float32 else 1.0)
    torch.testing.assert_close(got, expected)


def test_add_rms_norm_returns_the_norm_of_the_sum_and_the_sum() -> None:
    x, residual, weight = torch.randn(4, 32), torch.randn(4, 32), torch.rand(32)
    normed, total = reference.add_rms_norm(x, residual.clone(), weight, 1e-6)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, reference.rms_norm(x + residual, weight, 1e-6))


@pytest.mark.parametrize("head_dim", [32, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_of_a_head_or_its_first_part_equals_transformers(dtype: torch.dtype, head_dim: int) -> None:
    positions = torch.tensor([3, 0, 49, 7])
    angles = torch.arange(50).float()[:, None] / 10_000.0 ** (torch.arange(0, 32, 2) / 32)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    q, k = torch.randn(4, 6, head_dim).to(dtype), torch.randn(4, 2, head_dim).to(dtype)
    full = [torch.cat((half, half), -1)[positions] for half in (cos, sin)]
    expected = apply_rotary_pos_emb(q, k, *full, unsqueeze_dim=1)
    got = reference.rotary(q.clone(), k.clone(), positions, torch.cat((cos, sin), -1))
    torch.testing.assert_close(got, expected)


def test_layer_norm_equals_its_definition() -> None:
    x, weight, bias = torch.randn(5, 24) * 4, torch.randn(24), torch.randn(24)
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias
    torch.testing.assert_close(reference.layer_norm(x, weight, bias, 1e-5), expected)


@pytest.mark.parametrize("name", SUPPORTED_ACTIVATIONS)
def test_activation_equals_the_function_of_that_name_in_transformers(name: str) -> None:
    x = torch.randn(400) * 3
    torch.testing.assert_close(ops.ACTIVATIONS[name](x), ACT2FN[name](x))


def test_token_masks_forbid_tokens_whose_bit_is_not_set() -> None:
    logits = torch.randn(3, 70)
    expected = logits.clone()
    expected[2], expected[2, [0, 31, 32, 69]] = -torch.inf, logits[2, [0, 31, 32, 69]]
    expected[0, 33] = -torch.inf
    # The bits of tokens beyond the vocabulary, and the fourth word, mean nothing.
    masks = torch.tensor([[1 | -(2**31), 1, 0b1100000, 5], [-1, ~2, -1, 0]], dtype=torch.int32)
    reference.apply_token_masks(logits, masks, torch.tensor([2, 0]))
    assert torch.equal(logits, expected)


def test_silu_and_mul_gates_the_second_half_with_the_first() -> None:
    x = torch.randn(3, 20)
    gate, up = x[:, :10], x[:, 10:]
    torch.testing.assert_close(reference.silu_and_mul(x), gate / (1 + torch.exp(-gate)) * up)
