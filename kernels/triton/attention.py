"""Paged attention: decodes with their context split over programs, prefills in tiles of queries.

The softmax runs along the context (Milakov & Gimelshein 2018, FlashAttention, Dao et al. 2022). The query heads that
share a KV head are rows of one tile, so that keys and values are read once for all of them. No launch depends on
numbers that only the device knows, so it can be captured in a CUDA graph and replayed for other rows.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_mp.kernels import reference
from vllm_mp.kernels.attention_metadata import AttentionMetadata
from vllm_mp.kernels.triton.float8 import from_float8
from vllm_mp.kernels.triton.interpreter import product_dtype
from vllm_mp.kernels.triton.launch import MAX_HEAD_DIM, attention_options, num_splits, options, padded

_MAX_DECODE_HEADS = 64
"""The most query heads in one tile of a decode; with more, several programs read the same keys."""
_LOG2_E = tl.constexpr(math.log2(math.e))
_LOWEST = tl.constexpr(-3.4e38)
"""Stands for minus infinity where minus infinity would be subtracted from itself."""


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """See `ops.paged_attention`; decodes without a context, which pad a batch, get zeros.

    Later tokens that are not finite never affect a query, with or without `metadata.isolates`. `reference` computes
    heads that are too long for the kernels.
    """
    if not takes_heads(k_cache.shape[3], v_cache.shape[3]):
        return reference.paged_attention(q, k_cache, v_cache, metadata, scale, sliding_window, soft_cap)
    if q.stride(2) != 1:
        q = q.contiguous()
    out = torch.empty((*q.shape[:2], v_cache.shape[3]), dtype=q.dtype, device=q.device)
    if metadata.num_decodes:
        _decode(q, k_cache, v_cache, metadata, scale, sliding_window, soft_cap, out)
    if metadata.num_decodes < metadata.seq_lens.shape[0]:
        _prefill(q, k_cache, v_cache, metadata, scale, sliding_window, soft_cap, out)
    return out


def takes_heads(key_dim: int, value_dim: int) -> bool:
    """Tell whether the kernels take heads of these sizes."""
    return max(key_dim, value_dim) <= MAX_HEAD_DIM


def _decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    out: Tensor,
) -> None:
    """Fill `out` [num_tokens, num_heads, value_dim] for the decodes (Flash-Decoding, Dao et al. 2023)."""
    rows, device = metadata.num_decodes, q.device
    num_heads, key_dim = q.shape[1:]
    block_size, num_kv_heads, value_dim = v_cache.shape[1:]
    group = num_heads // num_kv_heads
    heads = min(group, _MAX_DECODE_HEADS)
    tiles = num_kv_heads * triton.cdiv(group, heads)
    context = min(metadata.max_seq_len, window) if window else metadata.max_seq_len
    splits = metadata.decode_splits or num_splits(rows * tiles, context, device)
    if splits == 1:
        parts, sums = out, out
    else:
        parts = torch.empty((rows, num_heads, splits, value_dim), dtype=torch.float32, device=device)
        sums = torch.empty((rows, num_heads, splits), dtype=torch.float32, device=device)
    _decode_kernel[(rows, tiles, splits)](
        q,
        k_cache,
        v_cache,
        parts,
        sums,
        metadata.seq_lens,
        metadata.block_table,
        metadata.block_table.stride(0),
        splits,
        scale,
        soft_cap or 0.0,
        q.stride(0),
        q.stride(1),
        GROUP=group,
        HEADS=heads,
        HEAD_TILE=padded(heads),
        KV_HEADS=num_kv_heads,
        KEY_DIM=key_dim,
        KEY_TILE=padded(key_dim),
        VALUE_DIM=value_dim,
        VALUE_TILE=padded(value_dim),
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        CAPPED=soft_cap is not None,
        PARTIAL=splits > 1,
        MIN_SPLIT=options("splits", device)["TOKENS"],
        PRODUCT=product_dtype(q.dtype),
        # Decodes wait for the cache, so its dtype decides; but float32 queries take too many registers for the
        # larger tiles of an 8-bit cache.
        **attention_options(
            "decode", q.dtype if q.dtype == torch.float32 else k_cache.dtype, max(key_dim, value_dim), device
        ),
    )
    if splits > 1:
        _merge_kernel[(rows, num_heads)](
            parts,
            sums,
            out,
            splits,
            HEADS=num_heads,
            SPLIT_TILE=padded(splits),
            VALUE_DIM=value_dim,
            VALUE_TILE=padded(value_dim),
            **options("merge", device),
        )


def _prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    out: Tensor,
) -> None:
    """Fill `out` [num_tokens, num_heads, value_dim] for the prefills.

    A tile holds the same number of tokens in every row of the step, and each row begins a tile of its own. Row i,
    whose first token is s, has the tiles from s // tokens + i on: as many as it needs, independent of other rows.
    """
    num_heads, key_dim = q.shape[1:]
    block_size, num_kv_heads, value_dim = v_cache.shape[1:]
    group = num_heads // num_kv_heads
    launch = attention_options("prefill", q.dtype, max(key_dim, value_dim), q.device)
    heads = min(group, launch["ROWS"])
    tokens = launch["ROWS"] // heads
    num_decodes = metadata.num_decodes
    num_prefills = metadata.seq_lens.shape[0] - num_decodes
    num_tiles = (q.shape[0] - num_decodes) // tokens + num_prefills
    _prefill_kernel[(num_tiles, num_kv_heads * triton.cdiv(group, heads))](
        q,
        k_cache,
        v_cache,
        out,
        metadata.query_start,
        metadata.seq_lens,
        metadata.block_table,
        metadata.block_table.stride(0),
        num_decodes,
        num_prefills,
        scale,
        soft_cap or 0.0,
        q.stride(0),
        q.stride(1),
        TOKENS=tokens,
        GROUP=group,
        HEADS=heads,
        KV_HEADS=num_kv_heads,
        KEY_DIM=key_dim,
        KEY_TILE=padded(key_dim),
        VALUE_DIM=value_dim,
        VALUE_TILE=padded(value_dim),
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        CAPPED=soft_cap is not None,
        PRODUCT=product_dtype(q.dtype),
        **launch,
    )


@triton.jit
def _add_keys(
    attended,  # float32 [ROWS, VALUE_TILE], the sum of values so far, each times exp(score - highest)
    highest,  # float32 [ROWS], the highest score so far, in units of ln 2
    total,  # float32 [ROWS], the sum of exp(score - highest) so far
    q,  # [ROWS, KEY_TILE]
    query_at,  # int32 [ROWS], the position of each query
    begin,
    stop,
    k_head,
    v_head,
    blocks,
    scale,
    soft_cap,
    KEYS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    PRODUCT: tl.constexpr,
    ENDS: tl.constexpr,  # whether the last tile of keys may reach past `stop`
    CAUSAL: tl.constexpr,  # whether some queries must not see some of the keys
):
    """Attend to the keys at positions [begin, stop) of the row whose blocks are at `blocks`."""
    key_dims = tl.arange(0, KEY_TILE)
    value_dims = tl.arange(0, VALUE_TILE)
    for at in tl.range(begin, stop, KEYS):
        key_at = at + tl.arange(0, KEYS)
        if ENDS:
            # Cells beyond `stop` belong to other requests or are unwritten, and are not read: zero times NaN is NaN.
            inside = key_at < stop
            block = tl.load(blocks + key_at // BLOCK_SIZE, mask=inside, other=0)
            k_mask = inside[None, :] & (key_dims < KEY_DIM)[:, None]
            v_mask = inside[:, None] & (value_dims < VALUE_DIM)[None, :]
        else:
            block = tl.load(blocks + key_at // BLOCK_SIZE)
            k_mask = (key_dims < KEY_DIM)[:, None]
            v_mask = (value_dims < VALUE_DIM)[None, :]
        cell = block.to(tl.int64) * BLOCK_SIZE + key_at % BLOCK_SIZE
        k = tl.load(k_head + cell[None, :] * (KV_HEADS * KEY_DIM) + key_dims[:, None], mask=k_mask, other=0.0)
        scores = tl.dot(q, from_float8(k, PRODUCT), input_precision="ieee")
        if CAPPED:
            # The hyperbolic tangent, computed from the magnitude so that nothing overflows.
            ratio = scores * (scale / soft_cap)
            decay = tl.exp2(tl.abs(ratio) * (-2.0 * _LOG2_E))
            tangent = (1.0 - decay) / (1.0 + decay)
            scores = tl.where(ratio < 0.0, -tangent, tangent) * (soft_cap * _LOG2_E)
        else:
            scores = scores * (scale * _LOG2_E)
        if CAUSAL:
            seen = key_at[None, :] <= query_at[:, None]
            if WINDOW > 0:
                seen = seen & (key_at[None, :] > query_at[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        elif ENDS:
            scores = tl.where(inside[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        # A query that has seen no key yet must not subtract infinity from infinity.
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - base[:, None])
        rescale = tl.exp2(highest - base)
        total = total * rescale + tl.sum(weights, 1)
        v = tl.load(v_head + cell[:, None] * (KV_HEADS * VALUE_DIM) + value_dims[None, :], mask=v_mask, other=0.0)
        v = from_float8(v, PRODUCT)
        if CAUSAL:
            # Zero times NaN is NaN, so a value that is not finite is replaced by zero, and the weights of the queries
            # that see it become NaN.
            is_not_finite = tl.max((~(tl.abs(v) < float("inf"))).to(tl.int32), 1) > 0
            weights = tl.where(seen & is_not_finite[None, :], float("nan"), weights)
            v = tl.where(is_not_finite[:, None], 0.0, v)
        attended = tl.dot(weights.to(PRODUCT), v, attended * rescale[:, None], input_precision="ieee")
        highest = new_highest
    return attended, highest, total


@triton.jit(do_not_specialize=["table_stride", "num_splits"])
def _decode_kernel(
    q,  # [num_tokens, num_heads, KEY_DIM]
    k_cache,  # [num_blocks, BLOCK_SIZE, KV_HEADS, KEY_DIM]
    v_cache,  # [num_blocks, BLOCK_SIZE, KV_HEADS, VALUE_DIM]
    parts,  # float32 [rows, num_heads, num_splits, VALUE_DIM], or the result unless PARTIAL
    sums,  # float32 [rows, num_heads, num_splits], the logarithm to base 2 of each part's sum of exponentials
    seq_lens,
    block_table,
    table_stride,
    num_splits,
    scale,
    soft_cap,
    q_token_stride,
    q_head_stride,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    PARTIAL: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    PRODUCT: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Attend to one part of the context of one row, for HEADS of the query heads that share a KV head."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1) % KV_HEADS
    first_head = tl.program_id(1) // KV_HEADS * HEADS
    split = tl.program_id(2)

    context = tl.load(seq_lens + row)
    oldest = 0
    if WINDOW > 0:
        oldest = tl.maximum(context - WINDOW, 0)
    part = tl.maximum(tl.cdiv(context - oldest, num_splits), MIN_SPLIT)
    part = tl.cdiv(part, KEYS) * KEYS
    begin = oldest + split * part
    stop = tl.minimum(begin + part, context)

    in_group = first_head + tl.arange(0, HEAD_TILE)
    in_tile = (tl.arange(0, HEAD_TILE) < HEADS) & (in_group < GROUP)
    head = kv_head * GROUP + in_group
    num_heads = KV_HEADS * GROUP
    place = (row * num_heads + head) * num_splits + split
    if PARTIAL and begin >= stop:
        tl.store(sums + place, float("-inf"), mask=in_tile)
        return

    key_dims = tl.arange(0, KEY_TILE)
    value_dims = tl.arange(0, VALUE_TILE)
    queries = tl.load(
        q + row * q_token_stride + head[:, None] * q_head_stride + key_dims[None, :],
        mask=in_tile[:, None] & (key_dims < KEY_DIM)[None, :],
        other=0.0,
    ).to(PRODUCT)
    attended, highest, total = _add_keys(
        tl.zeros([HEAD_TILE, VALUE_TILE], tl.float32),
        tl.full([HEAD_TILE], float("-inf"), tl.float32),
        tl.zeros([HEAD_TILE], tl.float32),
        queries,
        tl.zeros([HEAD_TILE], tl.int32) + context - 1,
        begin,
        stop,
        k_cache + kv_head * KEY_DIM,
        v_cache + kv_head * VALUE_DIM,
        block_table + row * table_stride,
        scale,
        soft_cap,
        KEYS,
        KV_HEADS,
        KEY_DIM,
        KEY_TILE,
        VALUE_DIM,
        VALUE_TILE,
        BLOCK_SIZE,
        WINDOW,
        CAPPED,
        PRODUCT,
        ENDS=True,
        CAUSAL=False,
    )
    # A row without a context divides zero by one.
    attended = attended / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        parts + place[:, None] * VALUE_DIM + value_dims[None, :],
        attended.to(parts.dtype.element_ty),
        mask=in_tile[:, None] & (value_dims < VALUE_DIM)[None, :],
    )
    if PARTIAL:
        tl.store(sums + place, highest + tl.log2(total), mask=in_tile)


@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(
    parts,
    sums,
    out,  # [num_tokens, HEADS, VALUE_DIM]
    num_splits,
    HEADS: tl.constexpr,
    SPLIT_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
):
    """Merge the parts of one row and head, each weighted by its share of the sum of exponentials."""
    at = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    split = tl.arange(0, SPLIT_TILE)
    value_dims = tl.arange(0, VALUE_TILE)
    logarithm = tl.load(sums + at * num_splits + split, mask=split < num_splits, other=float("-inf"))
    filled = logarithm != float("-inf")
    highest = tl.max(tl.where(filled, logarithm, _LOWEST), 0)
    weight = tl.exp2(logarithm - highest)
    part = tl.load(
        parts + (at * num_splits + split)[:, None] * VALUE_DIM + value_dims[None, :],
        mask=filled[:, None] & (value_dims < VALUE_DIM)[None, :],
        other=0.0,
    )
    total = tl.sum(weight, 0)
    merged = tl.sum(part * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + at * VALUE_DIM + value_dims, merged.to(out.dtype.element_ty), mask=value_dims < VALUE_DIM)


@triton.jit(do_not_specialize=["table_stride", "num_decodes", "num_prefills"])
def _prefill_kernel(
    q,  # [num_tokens, num_heads, KEY_DIM]
    k_cache,  # [num_blocks, BLOCK_SIZE, KV_HEADS, KEY_DIM]
    v_cache,  # [num_blocks, BLOCK_SIZE, KV_HEADS, VALUE_DIM]
    out,  # [num_tokens, num_heads, VALUE_DIM]
    query_start,
    seq_lens,
    block_table,
    table_stride,
    num_decodes,
    num_prefills,
    scale,
    soft_cap,
    q_token_stride,
    q_head_stride,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    PRODUCT: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Compute TOKENS consecutive queries of one row, for HEADS of the query heads that share a KV head."""
    # The last tiles of a prompt take longest, so they begin first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1) % KV_HEADS
    first_head = tl.program_id(1) // KV_HEADS * HEADS

    prefill = 0
    after = num_prefills
    while after - prefill > 1:
        middle = (prefill + after) // 2
        if (tl.load(query_start + num_decodes + middle) - num_decodes) // TOKENS + middle <= tile:
            prefill = middle
        else:
            after = middle
    row = (num_decodes + prefill).to(tl.int64)
    first = tl.load(query_start + row)
    end = tl.load(query_start + row + 1)
    first_tile = (first - num_decodes) // TOKENS + prefill
    token = first + (tile - first_tile) * TOKENS
    if token >= end:
        return

    context = tl.load(seq_lens + row)
    in_row = tl.arange(0, ROWS) // HEADS
    in_group = first_head + tl.arange(0, ROWS) % HEADS
    in_tile = (in_row < TOKENS) & (token + in_row < end) & (in_group < GROUP)
    head = kv_head * GROUP + in_group
    first_at = context - (end - token)
    query_at = first_at + in_row
    stop = tl.minimum(first_at + TOKENS, context)

    key_dims = tl.arange(0, KEY_TILE)
    value_dims = tl.arange(0, VALUE_TILE)
    queries = tl.load(
        q + (token + in_row).to(tl.int64)[:, None] * q_token_stride + head[:, None] * q_head_stride + key_dims[None, :],
        mask=in_tile[:, None] & (key_dims < KEY_DIM)[None, :],
        other=0.0,
    ).to(PRODUCT)
    attended = tl.zeros([ROWS, VALUE_TILE], tl.float32)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    k_head = k_cache + kv_head * KEY_DIM
    v_head = v_cache + kv_head * VALUE_DIM
    blocks = block_table + row * table_stride
    # Three ranges of keys: the oldest, which only some queries of the tile see because of the window; whole tiles that
    # all queries see; and the newest, which later queries see and earlier ones do not.
    oldest = 0
    seen_by_all = 0
    if WINDOW > 0:
        oldest = tl.maximum(first_at - WINDOW + 1, 0)
        seen_by_all = oldest + tl.cdiv(tl.maximum(first_at + TOKENS - WINDOW - oldest, 0), KEYS) * KEYS
        seen_by_all = tl.minimum(seen_by_all, stop)
        attended, highest, total = _add_keys(
            attended,
            highest,
            total,
            queries,
            query_at,
            oldest,
            seen_by_all,
            k_head,
            v_head,
            blocks,
            scale,
            soft_cap,
            KEYS,
            KV_HEADS,
            KEY_DIM,
            KEY_TILE,
            VALUE_DIM,
            VALUE_TILE,
            BLOCK_SIZE,
            WINDOW,
            CAPPED,
            PRODUCT,
            ENDS=True,
            CAUSAL=True,
        )
    newest = seen_by_all + tl.maximum(first_at + 1 - seen_by_all, 0) // KEYS * KEYS
    attended, highest, total = _add_keys(
        attended,
        highest,
        total,
        queries,
        query_at,
        seen_by_all,
        newest,
        k_head,
        v_head,
        blocks,
        scale,
        soft_cap,
        KEYS,
        KV_HEADS,
        KEY_DIM,
        KEY_TILE,
        VALUE_DIM,
        VALUE_TILE,
        BLOCK_SIZE,
        WINDOW,
        CAPPED,
        PRODUCT,
        ENDS=False,
        CAUSAL=False,
    )
    attended, highest, total = _add_keys(
        attended,
        highest,
        total,
        queries,
        query_at,
        newest,
        stop,
        k_head,
        v_head,
        blocks,
        scale,
        soft_cap,
        KEYS,
        KV_HEADS,
        KEY_DIM,
        KEY_TILE,
        VALUE_DIM,
        VALUE_TILE,
        BLOCK_SIZE,
        WINDOW,
        CAPPED,
        PRODUCT,
        ENDS=True,
        CAUSAL=True,
    )
    attended = attended / total[:, None]
    place = (token + in_row).to(tl.int64) * (KV_HEADS * GROUP) + head
    tl.store(
        out + place[:, None] * VALUE_DIM + value_dims[None, :],
        attended.to(out.dtype.element_ty),
        mask=in_tile[:, None] & (value_dims < VALUE_DIM)[None, :],
    )
