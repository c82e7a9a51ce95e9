"""The hot operations of a layer in plain torch, which define their results.

The contracts (shapes, dtypes, effects) stand in kernels/ops.py, on the functions with the same names. Every other
implementation (Triton, C++) is correct when it agrees with the function here.
Nothing in this file looks at the device: the same lines run on CPU and CUDA.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_mp.kernels import int8_cache
from vllm_mp.kernels.attention_metadata import AttentionMetadata
from vllm_mp.kernels.sampling import argmax as argmax
from vllm_mp.kernels.sampling import sample as sample
from vllm_mp.kernels.step_columns import copy_step as copy_step
from vllm_mp.kernels.step_columns import fill_awaited as fill_awaited

# Bounds on the size of what one attention call materialises, in elements of [rows or queries, context].
MAX_GATHERED_TOKENS = 32_768
MAX_MASK_ELEMENTS = 1 << 24

FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = 448.0
FLOAT8_GROUP = 128
"""The number of inputs of a projection that share a scale, if a row has more than one scale."""
LEAST_HIGHEST = 1e-10
"""The least value that counts as the highest magnitude of a group, so that a group of zeros has a scale."""
MASK_WORD = 32
"""The number of tokens of a word of a token mask."""


class QuantizedRows(NamedTuple):
    """Rows that `ops.quantize_rows` has quantized, instead of the rows themselves."""

    values: Tensor  # FLOAT8 [n, inputs]
    scale: Tensor  # float32 [n, num_groups]
    dtype: torch.dtype  # of the rows before, and of their products


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `ops.rms_norm`."""
    if weight.dtype != x.dtype:
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, None, eps) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `ops.add_rms_norm`."""
    residual = residual + x
    return rms_norm(residual, weight, eps), residual


def add_rms_norm_rows(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, num_groups: int
) -> tuple[QuantizedRows, Tensor]:
    """See `ops.add_rms_norm_rows`."""
    normed, residual = add_rms_norm(x, residual, weight, eps)
    return QuantizedRows(*quantize_rows(normed, num_groups), x.dtype), residual


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See `ops.layer_norm`."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> tuple[Tensor, Tensor]:
    """See `ops.rotary`."""
    cos, sin = cos_sin_cache.index_select(0, positions).unsqueeze(1).chunk(2, -1)
    # q and k share each operation, because the cost of a decode is the number of calls.
    both = torch.cat((q, k), 1)
    rotary_dim = cos_sin_cache.shape[-1]
    low, high = both[..., :rotary_dim].chunk(2, -1)
    rotated = torch.cat((low * cos - high * sin, high * cos + low * sin, both[..., rotary_dim:]), -1)
    return rotated[:, : q.shape[1]], rotated[:, q.shape[1] :]


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, cell_mapping: Tensor) -> None:
    """See `ops.write_kv`."""
    for new, cache in ((k, k_cache), (v, v_cache)):
        if cache.dtype == FLOAT8:
            new, cache = to_float8(new).view(torch.uint8), cache.view(torch.uint8)
        elif cache.dtype == torch.int8:
            new = int8_cache.to_cells(new)
        cache.view(-1, *new.shape[1:]).index_copy_(0, cell_mapping, new)


def rotary_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cell_mapping: Tensor,
) -> Tensor:
    """See `ops.rotary_write_kv`."""
    q, k = rotary(q, k, positions, cos_sin_cache)
    write_kv(k, v, k_cache, v_cache, cell_mapping)
    return q


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """See `ops.paged_attention`."""
    num_decodes = metadata.num_decodes
    num_rows = len(metadata.host_seq_lens)
    if num_decodes == num_rows == 1:
        return _decode(q, k_cache, v_cache, metadata, 0, 1, scale, sliding_window, soft_cap)
    out = q.new_empty(*q.shape[:2], int8_cache.head_size(v_cache))
    for first, last in _decode_groups(metadata.host_seq_lens[:num_decodes], sliding_window):
        out[first:last] = _decode(
            q[first:last], k_cache, v_cache, metadata, first, last, scale, sliding_window, soft_cap
        )
    token = num_decodes
    for row in range(num_decodes, num_rows):
        context, queries = metadata.host_seq_lens[row], metadata.query_lens[row]
        # Long prompts are cut into pieces, so that the mask of a piece stays bounded.
        piece = max(1, MAX_MASK_ELEMENTS // context)
        cuts = {*range(context - queries, context, piece), context}
        ends = None if metadata.attention_ends is None else metadata.attention_ends[token : token + queries]
        if metadata.isolates:
            cells = metadata.cell_mapping[token : token + queries]
            num_isolated = _num_finite(k_cache, v_cache, cells)
            if ends is not None:
                num_isolated = int((ends <= context - queries + num_isolated).sum())
            cuts.add(context - queries + num_isolated)
        for start, stop in itertools.pairwise(sorted(cuts)):
            first = start - context + queries
            out[token : token + stop - start] = _prefill(
                q[token : token + stop - start],
                k_cache,
                v_cache,
                metadata.block_table[row],
                start,
                None if ends is None else ends[first : first + stop - start],
                scale,
                sliding_window,
                soft_cap,
            )
            token += stop - start
    return out


def encoder_attention(q: Tensor, k: Tensor, v: Tensor, row_lens: Sequence[int], scale: float) -> Tensor:
    """See `ops.encoder_attention`."""
    out = torch.empty_like(q)
    first = 0
    for count in row_lens:
        row = slice(first, first + count)
        row_q, row_k, row_v = (part[row].transpose(0, 1).unsqueeze(0) for part in (q, k, v))
        out[row] = _attend(row_q, row_k, row_v, None, False, scale, None).squeeze(0).transpose(0, 1)
        first += count
    return out


def to_float8(x: Tensor) -> Tensor:
    """Return `x` in `FLOAT8`, rounded to nearest even and saturated: infinity becomes 448. A NaN stays NaN."""
    return x.clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8)


def quantize_rows(x: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """See `ops.quantize_rows`."""
    rows, inputs = x.shape
    size = inputs if num_groups == 1 else FLOAT8_GROUP
    groups = F.pad(x.float(), (0, num_groups * size - inputs)).view(rows, num_groups, size)
    scale = groups.abs().amax(-1).clamp(min=LEAST_HIGHEST) / FLOAT8_MAX
    quantized = to_float8(groups / scale.unsqueeze(-1)).view(rows, num_groups * size)[:, :inputs]
    return quantized.contiguous(), scale


def linear(
    x: Tensor | QuantizedRows, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """See `ops.linear`."""
    if scale is None:
        assert isinstance(x, Tensor), "quantized rows need a weight with scales"
        return F.linear(x, weight, bias)
    rows, shape = rows_of_product(x, scale.shape[1], quantize_rows)
    product = _scaled(rows.values, rows.scale) @ _scaled(weight, scale).T
    if bias is not None:
        product += bias.float()
    return product.to(rows.dtype).view(*shape, len(weight))


def rows_of_product(
    x: Tensor | QuantizedRows, num_groups: int, quantize: Callable[[Tensor, int], tuple[Tensor, Tensor]]
) -> tuple[QuantizedRows, torch.Size]:
    """Return `x` [..., inputs] as quantized rows, and its shape without the last dimension."""
    if isinstance(x, QuantizedRows):
        return x, x.values.shape[:-1]
    return QuantizedRows(*quantize(x.reshape(-1, x.shape[-1]), num_groups), x.dtype), x.shape[:-1]


def _scaled(quantized: Tensor, scale: Tensor) -> Tensor:
    """Return the float32 [n, inputs] that `FLOAT8` [n, inputs] and its scales [n / r, groups] stand for."""
    rows, inputs = quantized.shape
    each = scale.repeat_interleave(rows // max(1, len(scale)), 0)
    if scale.shape[1] > 1:
        each = each.repeat_interleave(FLOAT8_GROUP, 1)[:, :inputs]
    return quantized.float() * each


def add_adapters(
    out: Tensor, x: Tensor, adapter_slots: Tensor, a: Tensor, b: Tensor, part_sizes: Sequence[int]
) -> None:
    """See `ops.add_adapters`."""
    num_slots, parts, max_rank, inputs = a.shape
    ranked = (x @ a.view(-1, inputs).T).view(-1, num_slots, parts, max_rank)
    is_own = adapter_slots.unsqueeze(1) == torch.arange(num_slots, device=x.device)
    ranked = ranked.masked_fill(~is_own[:, :, None, None], 0.0)
    outs, bs = torch.split(out, list(part_sizes), 1), torch.split(b, list(part_sizes), 2)
    for part, (of_out, of_b) in enumerate(zip(outs, bs, strict=True)):
        of_out += ranked[:, :, part].flatten(1) @ of_b.flatten(0, 1)


def apply_token_masks(logits: Tensor, masks: Tensor, rows: Tensor) -> None:
    """See `ops.apply_token_masks`."""
    vocab_size = logits.shape[1]
    words = masks[:, : -(-vocab_size // MASK_WORD)].unsqueeze(-1)
    bits = words >> torch.arange(MASK_WORD, dtype=torch.int32, device=masks.device) & 1
    logits[rows] = logits[rows].masked_fill(bits.flatten(1)[:, :vocab_size] == 0, -torch.inf)


def silu_and_mul(x: Tensor) -> Tensor:
    """See `ops.silu_and_mul`."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def silu_and_mul_rows(x: Tensor, num_groups: int) -> QuantizedRows:
    """See `ops.silu_and_mul_rows`."""
    return QuantizedRows(*quantize_rows(silu_and_mul(x), num_groups), x.dtype)


def experts(
    x: Tensor,
    expert_ids: Tensor,
    router_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activate: Callable[[Tensor], Tensor],
) -> Tensor:
    """See `ops.experts`; `activate` makes `inner` columns of the columns of gate and up."""

    def compute(expert: int, rows: Tensor) -> Tensor:
        return F.linear(activate(F.linear(rows, gate_up[expert])), down[expert])

    return sum_of_experts(x, expert_ids, router_weights, compute)


def sum_of_experts(
    x: Tensor, expert_ids: Tensor, router_weights: Tensor, compute: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """Return `ops.experts` for experts of which `compute(expert, rows)` computes some rows of `x`."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in sorted(set(expert_ids.flatten().tolist())):
        tokens, choices = torch.where(expert_ids == expert)
        outputs = compute(expert, x[tokens])
        total.index_add_(0, tokens, outputs.float() * router_weights[tokens, choices, None])
    return total.to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """See `ops.gelu`."""
    return F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """See `ops.gelu_tanh`."""
    return F.gelu(x, approximate="tanh")


def _decode_groups(seq_lens: Sequence[int], window: int | None) -> Iterator[tuple[int, int]]:
    """Yield runs `[first, last)` of decode rows that are computed together, padded to the longest context.

    A run ends before its padding would outnumber its real tokens, or its gathered context exceed the memory bound.
    """
    first = total = longest = 0
    for row, seq_len in enumerate(seq_lens):
        visible = min(seq_len, window) if window else seq_len
        padded = (row - first + 1) * max(longest, visible)
        if row > first and (padded > MAX_GATHERED_TOKENS or padded > 2 * (total + visible)):
            yield first, row
            first, total, longest = row, 0, 0
        total += visible
        longest = max(longest, visible)
    if seq_lens:
        yield first, len(seq_lens)


def _decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    first: int,
    last: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Tensor:
    """Attend from the decode rows `[first, last)`.

    `q` is [rows, num_heads, head_dim], the result [rows, num_heads, value_dim].
    """
    rows, num_heads, head_dim = q.shape
    num_kv_heads, value_dim = v_cache.shape[2], int8_cache.head_size(v_cache)
    mask = None
    if rows == 1:
        context = metadata.host_seq_lens[first]
        begin = max(0, context - window) if window else 0
        k = _row_context(k_cache, metadata.block_table[first], begin, context, q.dtype).unsqueeze(0)
        v = _row_context(v_cache, metadata.block_table[first], begin, context, q.dtype).unsqueeze(0)
    else:
        block_size = k_cache.shape[1]
        lens = metadata.seq_lens[first:last].unsqueeze(1)
        longest = max(metadata.host_seq_lens[first:last])
        if window:
            longest = min(longest, window)
            begins = (lens - window).clamp_(min=0)
        else:
            begins = torch.zeros_like(lens)
        position = begins + torch.arange(longest, dtype=lens.dtype, device=lens.device)
        mask = (position < lens).view(rows, 1, 1, longest)
        # Padding repeats the row's own last token: a masked weight of zero would not stop another request's NaN.
        position = torch.minimum(position, lens - 1)
        block = position // block_size
        cells = metadata.block_table[first:last].gather(1, block.long()) * block_size + position % block_size
        flat = cells.view(-1)
        k = _select(k_cache.flatten(0, 1), flat, q.dtype).view(rows, longest, -1, head_dim)
        v = _select(v_cache.flatten(0, 1), flat, q.dtype).view(rows, longest, -1, value_dim)
    # A decode has one position, so the query axis is free for the heads that share a KV head.
    grouped = q.view(rows, num_kv_heads, -1, head_dim)
    attended = _attend(grouped, k.transpose(1, 2), v.transpose(1, 2), mask, False, scale, soft_cap)
    return attended.reshape(rows, num_heads, value_dim)


def _prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    blocks: Tensor,
    start: int,
    ends: Tensor | None,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Tensor:
    """Attend from one row's queries at `start` on: `q` [n, num_heads, head_dim], result [n, num_heads, value_dim].

    `ends` [n] are those of the queries in `AttentionMetadata.attention_ends`, or None.
    """
    after = start + q.shape[0]
    stop = after if ends is None else int(ends[-1])
    begin = max(0, start - window + 1) if window else 0
    k = _row_context(k_cache, blocks, begin, stop, q.dtype).transpose(0, 1).unsqueeze(0)
    v = _row_context(v_cache, blocks, begin, stop, q.dtype).transpose(0, 1).unsqueeze(0)
    causal_only = start == 0 and ends is None and soft_cap is None and (window is None or window >= stop)
    mask = None
    if not causal_only:
        query_at = torch.arange(start, after, device=q.device).unsqueeze(1)
        key_at = torch.arange(begin, stop, device=q.device)
        mask = key_at <= query_at if ends is None else key_at < ends.unsqueeze(1)
        if window:
            mask &= key_at > query_at - window
    attended = _attend(q.transpose(0, 1).unsqueeze(0), k, v, mask, causal_only, scale, soft_cap)
    return attended.squeeze(0).transpose(0, 1)


def _num_finite(k_cache: Tensor, v_cache: Tensor, cells: Tensor) -> int:
    """Return the number of tokens in `cells` [n] before the first whose keys or values are not finite."""
    keys, values = (
        _select(cache.flatten(0, 1), cells, torch.float32).isfinite().flatten(1).all(1) for cache in (k_cache, v_cache)
    )
    return int((keys & values).cumprod(0).sum())


def _select(cache: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the keys or values in `cache[index]` in `dtype`."""
    if cache.dtype == FLOAT8:
        return cache.view(torch.uint8).index_select(0, index).view(FLOAT8).to(dtype)
    if cache.dtype == torch.int8:
        return int8_cache.from_cells(cache.index_select(0, index), dtype)
    return cache.index_select(0, index).to(dtype)


def _row_context(cache: Tensor, blocks: Tensor, begin: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Return the cells of positions `[begin, stop)` of one row: `dtype` [stop - begin, num_kv_heads, dim]."""
    block_size = cache.shape[1]
    first_block = begin // block_size
    gathered = _select(cache, blocks[first_block : -(-stop // block_size)], dtype)
    offset = first_block * block_size
    return gathered.flatten(0, 1)[begin - offset : stop - offset]


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    soft_cap: float | None,
) -> Tensor:
    """Attend over gathered context, by softmax.

    `q` [batch, heads, queries, head_dim], `k` and `v` [batch, kv_heads, keys, head_dim], `mask` bool and
    broadcastable to [batch, heads, queries, keys], True where a key is seen. Returns the shape of `q`, with
    the head_dim of `v`.
    """
    shared = q.shape[1] != k.shape[1]
    if soft_cap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=shared)
    if shared:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    scores = torch.tanh((q @ k.transpose(-1, -2)).float() * (scale / soft_cap)) * soft_cap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, -1).to(q.dtype) @ v
