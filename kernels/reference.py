"""The hot operations of a layer, each defined by its plain torch implementation.

Every other implementation (Triton, C++) of an operation is correct when it agrees with the function here.
Nothing in this file looks at the device: the same lines run on CPU and CUDA.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_mp.kernels.sampling import NO_PLACE as NO_PLACE
from vllm_mp.kernels.sampling import argmax as argmax
from vllm_mp.kernels.sampling import sample as sample

# Bounds on what one attention call materialises, in elements of [rows or queries, context].
MAX_GATHERED_TOKENS = 32_768
MAX_MASK_ELEMENTS = 1 << 24

FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = 448.0
FLOAT8_GROUP = 128
"""Inputs of a projection that share a scale, where there is more than one for a row."""
LEAST_HIGHEST = 1e-10
"""Stands for the highest magnitude of a group in which everything is smaller, as in one of zeros."""


class AttentionMetadata(NamedTuple):
    """Where the tokens of one step stand in the paged KV cache.

    Rows (one per sequence in the step) and their query tokens are laid out consecutively in row order: the
    first `num_decodes` rows have exactly one query token each, the rest are chunks of prefill. Rows may have
    blocks in common, also ones that one of them fills in this very step: in each layer the keys and values
    of the whole step are written before attention reads any. The host fields repeat what the tensors say, so
    that reading a length never waits for the device.
    """

    query_start: Tensor  # int32 [num_rows + 1], first query token of each row, then num_tokens
    seq_lens: Tensor  # int32 [num_rows], context length in tokens, the new ones included
    block_table: Tensor  # int32 [num_rows, max_blocks]; entries past a row's context are never read
    cell_mapping: Tensor  # int64 [num_tokens], block * block_size + offset of each new token
    query_lens: Sequence[int]  # [num_rows]
    host_seq_lens: Sequence[int]  # [num_rows]
    num_decodes: int
    max_seq_len: int
    isolates: bool = False
    """A prefill's queries are kept from keys and values of later tokens even where these are not finite.

    Some implementations do so in any case (`ops.isolates`)."""
    decode_splits: int | None = None
    """Into how many parts a GPU cuts the context of every decode; None leaves it to the kernel.

    A number holds for what is captured in a graph, whose launches stay as they are while contexts grow.
    """
    attend: Callable[..., Tensor] | None = None
    """Takes the place of `ops.paged_attention`; None where the types and the device of what is given decide."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square normalisation over the last dimension (Zhang & Sennrich 2019).

    `x` [..., dim], `weight` [dim] of the same dtype. The statistics are float32; the normalised value is
    rounded to `x.dtype` before the weight multiplies it, as transformers does.
    """
    return F.rms_norm(x, (x.shape[-1],), None, eps) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`(rms_norm(x + residual), x + residual)`, the sum rounded to `x.dtype`. Both inputs [..., dim]."""
    residual = residual + x
    return rms_norm(residual, weight, eps), residual


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer normalisation over the last dimension (Ba et al. 2016): `x` [..., dim], the others [dim]."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary position embedding in the half-split (NeoX) layout (Su et al. 2021): the rotated `(q, k)`.

    `q` [num_tokens, num_heads, head_dim], `k` [num_tokens, num_kv_heads, head_dim], `positions` int64
    [num_tokens], `cos_sin_cache` [max_position, head_dim] in the dtype of `q`: the cosines of the head_dim /
    2 frequencies, then the sines. An implementation may rotate in place: use the result, not the inputs.
    """
    cos, sin = cos_sin_cache.index_select(0, positions).unsqueeze(1).chunk(2, -1)
    # q and k share each operation: at decode, the number of calls is the cost.
    low, high = torch.cat((q, k), 1).chunk(2, -1)
    rotated = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
    return rotated[:, : q.shape[1]], rotated[:, q.shape[1] :]


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, cell_mapping: Tensor) -> None:
    """Store the keys and values of the new tokens in their cache slots, in place.

    `k`, `v` [num_tokens, num_kv_heads, head_dim]; caches [num_blocks, block_size, num_kv_heads, head_dim] of
    the same dtype or, for `to_float8`, in `FLOAT8`, contiguous; `cell_mapping` int64 [num_tokens], distinct and
    in range. The head_dim of values may be another than that of keys.
    """
    for new, cache in ((k, k_cache), (v, v_cache)):
        if cache.dtype == FLOAT8:
            new, cache = to_float8(new).view(torch.uint8), cache.view(torch.uint8)
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
    """`rotary`, and `write_kv` of the rotated keys: the rotated queries."""
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
    """Causal attention of each row's query tokens over its whole context (PagedAttention, Kwon et al. 2023).

    `q` [num_tokens, num_heads, head_dim]; caches [num_blocks, block_size, num_kv_heads, head_dim] of the dtype of
    `q`, or in `FLOAT8` and then brought to it, in which
    the new tokens of all rows are written already, as a row may read what another row of the step wrote;
    query head h reads KV head h // (num_heads / num_kv_heads). The query at position p sees the keys in
    (p - sliding_window, p]. With `soft_cap` the scaled scores become soft_cap * tanh(score / soft_cap) before
    the softmax (Gemma 2). Returns [num_tokens, num_heads, head_dim]; with values of another head_dim than
    keys and queries have (DeepSeek's latent attention), theirs.

    A row reads no slot but those of its context, so whatever another request left in the cache (a NaN
    included) stays there. Within a row a mask does not stop a NaN, as a weight of zero times NaN is NaN; with
    `metadata.isolates`, queries before the first of the row's new tokens that is not finite do not meet it.
    """
    num_decodes = metadata.num_decodes
    num_rows = len(metadata.host_seq_lens)
    if num_decodes == num_rows == 1:
        return _decode(q, k_cache, v_cache, metadata, 0, 1, scale, sliding_window, soft_cap)
    out = q.new_empty(*q.shape[:2], v_cache.shape[-1])
    for first, last in _decode_groups(metadata.host_seq_lens[:num_decodes], sliding_window):
        out[first:last] = _decode(
            q[first:last], k_cache, v_cache, metadata, first, last, scale, sliding_window, soft_cap
        )
    token = num_decodes
    for row in range(num_decodes, num_rows):
        context, queries = metadata.host_seq_lens[row], metadata.query_lens[row]
        # Long prompts go in pieces, so that the mask of one piece stays bounded.
        piece = max(1, MAX_MASK_ELEMENTS // context)
        cuts = {*range(context - queries, context, piece), context}
        if metadata.isolates:
            slots = metadata.cell_mapping[token : token + queries]
            cuts.add(context - queries + _num_finite(k_cache, v_cache, slots))
        for start, stop in itertools.pairwise(sorted(cuts)):
            out[token : token + stop - start] = _prefill(
                q[token : token + stop - start],
                k_cache,
                v_cache,
                metadata.block_table[row],
                start,
                scale,
                sliding_window,
                soft_cap,
            )
            token += stop - start
    return out


def encoder_attention(q: Tensor, k: Tensor, v: Tensor, row_lens: Sequence[int], scale: float) -> Tensor:
    """Attention in both directions, each token's over all tokens of its row (Vaswani et al. 2017).

    `q`, `k`, `v` [num_tokens, num_heads, head_dim], the rows laid out consecutively, row i of `row_lens[i]` tokens.
    Returns [num_tokens, num_heads, head_dim]. A row reads no other row's tokens, so a NaN stays in its row.
    """
    out = torch.empty_like(q)
    first = 0
    for count in row_lens:
        row = slice(first, first + count)
        one_q, one_k, one_v = (part[row].transpose(0, 1).unsqueeze(0) for part in (q, k, v))
        out[row] = _attend(one_q, one_k, one_v, None, False, scale, None).squeeze(0).transpose(0, 1)
        first += count
    return out


def to_float8(x: Tensor) -> Tensor:
    """`x` in `FLOAT8`, rounded to the nearest (the even one of two) and saturated: what is infinite becomes 448.

    A NaN stays one.
    """
    return x.clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8)


def quantize_rows(x: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """The rows of `x` [n, inputs] in `FLOAT8` [n, inputs], and what these are to be multiplied with.

    The scales are float32 [n, num_groups], of each row or, for num_groups = ceil(inputs / 128), of each group of 128 of
    its elements: what brings the highest magnitude of the group to 448. A row that is not finite has a NaN in it.
    """
    rows, inputs = x.shape
    size = inputs if num_groups == 1 else FLOAT8_GROUP
    groups = F.pad(x.float(), (0, num_groups * size - inputs)).view(rows, num_groups, size)
    scale = groups.abs().amax(-1).clamp(min=LEAST_HIGHEST) / FLOAT8_MAX
    quantized = to_float8(groups / scale.unsqueeze(-1)).view(rows, num_groups * size)[:, :inputs]
    return quantized.contiguous(), scale


def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ (weight * scale).T + bias`, of `x` what `quantize_rows` leaves of it; the sums are float32.

    `x` [..., inputs]; `weight` `FLOAT8` [outputs, inputs], contiguous; `bias` [outputs] or None; the result is
    [..., outputs] in the dtype of `x`. `scale` float32 [outputs / r, groups] has a row for each r outputs and a column
    for all inputs or, with groups = ceil(inputs / 128), for each 128; `x` has as many scales a row.
    """
    rows = x.reshape(-1, x.shape[-1])
    product = _scaled(*quantize_rows(rows, scale.shape[1])) @ _scaled(weight, scale).T
    if bias is not None:
        product += bias.float()
    return product.to(x.dtype).view(*x.shape[:-1], len(weight))


def _scaled(quantized: Tensor, scale: Tensor) -> Tensor:
    """Float32 [n, inputs] of `FLOAT8` [n, inputs] and its scales [n / r, groups]."""
    rows, inputs = quantized.shape
    each = scale.repeat_interleave(rows // max(1, len(scale)), 0)
    if scale.shape[1] > 1:
        each = each.repeat_interleave(FLOAT8_GROUP, 1)[:, :inputs]
    return quantized.float() * each


def silu_and_mul(x: Tensor) -> Tensor:
    """SwiGLU's product (Shazeer 2020): `silu(x[..., :dim]) * x[..., dim:]` for `x` [..., 2 * dim]."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def gelu(x: Tensor) -> Tensor:
    """Gaussian error linear unit with the exact error function (Hendrycks & Gimpel 2016), elementwise."""
    return F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of GELU (what GPT-2 was trained with), elementwise."""
    return F.gelu(x, approximate="tanh")


def _decode_groups(seq_lens: Sequence[int], window: int | None) -> Iterator[tuple[int, int]]:
    """Split the decode rows into runs `[first, last)` that are attended to together, padded to the longest.

    A run ends before padding would outweigh its real tokens, or its gathered context the memory bound.
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
    """Attention of the single-token rows `[first, last)`; `q` and the result [rows, num_heads, head_dim]."""
    rows, num_heads, head_dim = q.shape
    num_kv_heads, value_dim = v_cache.shape[2:]
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
        # Padding repeats the row's own last token: a masked weight of zero does not stop a stranger's NaN.
        position = torch.minimum(position, lens - 1)
        block = position // block_size
        slots = metadata.block_table[first:last].gather(1, block.long()) * block_size + position % block_size
        flat = slots.view(-1)
        k = _select(k_cache.flatten(0, 1), flat, q.dtype).view(rows, longest, -1, head_dim)
        v = _select(v_cache.flatten(0, 1), flat, q.dtype).view(rows, longest, -1, value_dim)
    # With one position there is no order among queries: the heads that share a KV head take the query axis.
    grouped = q.view(rows, num_kv_heads, -1, head_dim)
    attended = _attend(grouped, k.transpose(1, 2), v.transpose(1, 2), mask, False, scale, soft_cap)
    return attended.reshape(rows, num_heads, value_dim)


def _prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    blocks: Tensor,
    start: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Tensor:
    """Attention of one row's queries from position `start` on; `q` and result [n, num_heads, head_dim]."""
    stop = start + q.shape[0]
    begin = max(0, start - window + 1) if window else 0
    k = _row_context(k_cache, blocks, begin, stop, q.dtype).transpose(0, 1).unsqueeze(0)
    v = _row_context(v_cache, blocks, begin, stop, q.dtype).transpose(0, 1).unsqueeze(0)
    causal_only = start == 0 and soft_cap is None and (window is None or window >= stop)
    mask = None
    if not causal_only:
        query_at = torch.arange(start, stop, device=q.device).unsqueeze(1)
        key_at = torch.arange(begin, stop, device=q.device)
        mask = key_at <= query_at
        if window:
            mask &= key_at > query_at - window
    attended = _attend(q.transpose(0, 1).unsqueeze(0), k, v, mask, causal_only, scale, soft_cap)
    return attended.squeeze(0).transpose(0, 1)


def _num_finite(k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> int:
    """How many of the tokens at `slots` [n] come before the first that is not finite."""
    new = (_select(cache.flatten(0, 1), slots, torch.float32) for cache in (k_cache, v_cache))
    finite = [one.isfinite().flatten(1).all(1) for one in new]
    return int((finite[0] & finite[1]).cumprod(0).sum())


def _select(cache: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """`cache[index]` in `dtype`."""
    if cache.dtype == FLOAT8:
        return cache.view(torch.uint8).index_select(0, index).view(FLOAT8).to(dtype)
    return cache.index_select(0, index).to(dtype)


def _row_context(cache: Tensor, blocks: Tensor, begin: int, stop: int, dtype: torch.dtype) -> Tensor:
    """The slots of positions `[begin, stop)` of one row, in order: `dtype` [stop - begin, num_kv_heads, head_dim]."""
    block_size = cache.shape[1]
    first_block = begin // block_size
    gathered = _select(cache, blocks[first_block : -(-stop // block_size)], dtype)
    offset = first_block * block_size
    return gathered.view(-1, *cache.shape[2:])[begin - offset : stop - offset]


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    soft_cap: float | None,
) -> Tensor:
    """Softmax attention over gathered context.

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
