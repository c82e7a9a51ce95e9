"""Paged attention for decodes, with their context split over programs.

Every context is cut into the number of parts that keeps the device busy, and a long one into more, so that the batch
does not wait for it. Only the device knows which rows are long; in a captured graph, a program for each part that a row
might have would mostly find nothing to do. So each row has programs of its own for the first parts only, and programs
that serve a group of rows compute the others.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_mp.kernels.attention_metadata import AttentionMetadata
from vllm_mp.kernels.reference import FLOAT8
from vllm_mp.kernels.triton.attention.attended_keys import add_keys, factor_dtype, factors
from vllm_mp.kernels.triton.launch import attention_options, num_slots, num_splits, options, padded

_MAX_HEADS = 64
"""The most query heads in one tile; with more, several programs read the same keys."""
_LOWEST = tl.constexpr(-3.4e38)
"""Stands for minus infinity where minus infinity would be subtracted from itself."""


def decode(
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
    heads = min(group, _MAX_HEADS)
    tiles = num_kv_heads * triton.cdiv(group, heads)
    context = min(metadata.max_seq_len, window) if window else metadata.max_seq_len
    splits = metadata.decode_splits or num_splits(rows * tiles, context, device)
    slots = num_slots(rows, splits, context, device)
    if slots == 1:
        parts, sums = out, out
    else:
        parts = torch.empty((rows, num_heads, slots, value_dim), dtype=torch.float32, device=device)
        sums = torch.empty((rows, num_heads, slots), dtype=torch.float32, device=device)
    limits = options("splits", device)
    # Decodes wait for the cache, so its dtype decides; but float32 queries take too many registers for the larger tiles
    # of an 8-bit cache.
    deciding = q.dtype if q.dtype == torch.float32 else k_cache.dtype
    launch = attention_options("decode", deciding, max(key_dim, value_dim), device)
    cut = {
        "WINDOW": window or 0,
        "MIN_PART": limits["TOKENS"],
        "MAX_PART": limits["MAX_TOKENS"],
        "KEYS": launch["KEYS"],
    }
    num_groups = triton.cdiv(rows, limits["ROWS"])
    # Two values of 8 bits are read as one element; see `add_keys`.
    paired = v_cache.dtype == FLOAT8 and value_dim % 2 == 0
    _decode_kernel[(tiles * (num_groups * (slots - splits) + rows * splits),)](
        q,
        k_cache,
        v_cache.view(torch.int16) if paired else v_cache,
        parts,
        sums,
        metadata.seq_lens,
        metadata.block_table,
        metadata.block_table.stride(0),
        rows,
        splits,
        slots,
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
        CAPPED=soft_cap is not None,
        PARTIAL=slots > 1,
        GROUP_ROWS=limits["ROWS"],
        PRODUCT=factor_dtype(q, k_cache),
        PAIRED=paired,
        **{**launch, **cut},
    )
    if slots > 1:
        _merge_kernel[(rows, num_heads)](
            parts,
            sums,
            out,
            metadata.seq_lens,
            splits,
            slots,
            HEADS=num_heads,
            SLOT_TILE=padded(slots),
            VALUE_DIM=value_dim,
            VALUE_TILE=padded(value_dim),
            **cut,
            **options("merge", device),
        )


@triton.jit
def _cut(
    context,
    num_splits,
    num_slots,
    WINDOW: tl.constexpr,
    MIN_PART: tl.constexpr,
    MAX_PART: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Return the tokens of each part of a context of `context` tokens, and the number of parts."""
    if WINDOW > 0:
        context = tl.minimum(context, WINDOW)
    part = tl.maximum(tl.minimum(tl.cdiv(context, num_splits), MAX_PART), MIN_PART)
    part = tl.cdiv(tl.maximum(part, tl.cdiv(context, num_slots)), KEYS) * KEYS
    return part, tl.cdiv(context, part)


@triton.jit(do_not_specialize=["table_stride", "num_rows", "num_splits", "num_slots"])
def _decode_kernel(
    q,  # [num_tokens, num_heads, KEY_DIM]
    k_cache,  # [num_blocks, BLOCK_SIZE, KV_HEADS, KEY_DIM]
    v_cache,  # [num_blocks, BLOCK_SIZE, KV_HEADS, VALUE_DIM], or int16 [..., VALUE_DIM / 2] if PAIRED
    parts,  # float32 [num_rows, num_heads, num_slots, VALUE_DIM], or the result unless PARTIAL
    sums,  # float32 [num_rows, num_heads, num_slots], the logarithm to base 2 of each part's sum of exponentials
    seq_lens,
    block_table,
    table_stride,
    num_rows,
    num_splits,  # parts of each row that have programs of their own
    num_slots,  # the most parts of a row
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
    CAPPED: tl.constexpr,
    PARTIAL: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    PRODUCT: tl.constexpr,
    PAIRED: tl.constexpr,
    WINDOW: tl.constexpr,
    MIN_PART: tl.constexpr,
    MAX_PART: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Attend to one part of the context of one row, or of each long row of a group.

    A program computes HEADS of the query heads that share a KV head. The KV heads of a token share lines of memory, so
    their programs run side by side.
    """
    tiles: tl.constexpr = KV_HEADS * ((GROUP + HEADS - 1) // HEADS)
    kv_head = tl.program_id(0) % tiles % KV_HEADS
    first_head = tl.program_id(0) % tiles // KV_HEADS * HEADS
    at = tl.program_id(0) // tiles
    # Programs for groups of rows come first, because their parts are the longest.
    num_groups = tl.cdiv(num_rows, GROUP_ROWS)
    num_grouped = num_groups * (num_slots - num_splits)
    is_grouped = at < num_grouped
    own = at - num_grouped
    split = tl.where(is_grouped, num_splits + at // num_groups, own // num_rows)
    first_row = tl.where(is_grouped, at % num_groups * GROUP_ROWS, own % num_rows)
    end_row = tl.minimum(first_row + tl.where(is_grouped, GROUP_ROWS, 1), num_rows)
    rows = first_row + tl.arange(0, GROUP_ROWS)
    _, num_parts = _cut(
        tl.load(seq_lens + rows, mask=rows < end_row, other=0), num_splits, num_slots, WINDOW, MIN_PART, MAX_PART, KEYS
    )
    # A row without a context has no part to merge; without merging, its program writes zeros.
    rows = tl.where((rows < end_row) & ((split < num_parts) | (PARTIAL == 0)), rows, end_row)
    row = tl.min(rows, 0)
    while row < end_row:
        _attend_part(
            q + row.to(tl.int64) * q_token_stride,
            k_cache,
            v_cache,
            parts,
            sums,
            tl.load(seq_lens + row),
            block_table + row.to(tl.int64) * table_stride,
            row.to(tl.int64),
            split,
            num_splits,
            num_slots,
            kv_head,
            first_head,
            scale,
            soft_cap,
            q_head_stride,
            GROUP,
            HEADS,
            HEAD_TILE,
            KV_HEADS,
            KEY_DIM,
            KEY_TILE,
            VALUE_DIM,
            VALUE_TILE,
            BLOCK_SIZE,
            CAPPED,
            PARTIAL,
            PRODUCT,
            PAIRED,
            WINDOW,
            MIN_PART,
            MAX_PART,
            KEYS,
        )
        row = tl.min(tl.where(rows > row, rows, end_row), 0)


@triton.jit
def _attend_part(
    q,
    k_cache,
    v_cache,
    parts,
    sums,
    context,
    blocks,
    row,
    split,
    num_splits,
    num_slots,
    kv_head,
    first_head,
    scale,
    soft_cap,
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
    CAPPED: tl.constexpr,
    PARTIAL: tl.constexpr,
    PRODUCT: tl.constexpr,
    PAIRED: tl.constexpr,
    WINDOW: tl.constexpr,
    MIN_PART: tl.constexpr,
    MAX_PART: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Attend to the part `split` of the context of one row, for HEADS of the query heads from `first_head` on."""
    part, _ = _cut(context, num_splits, num_slots, WINDOW, MIN_PART, MAX_PART, KEYS)
    oldest = 0
    if WINDOW > 0:
        oldest = tl.maximum(context - WINDOW, 0)
    begin = oldest + split * part
    stop = tl.minimum(begin + part, context)

    in_group = first_head + tl.arange(0, HEAD_TILE)
    in_tile = (tl.arange(0, HEAD_TILE) < HEADS) & (in_group < GROUP)
    head = kv_head * GROUP + in_group
    num_heads = KV_HEADS * GROUP
    part = (row * num_heads + head) * num_slots + split
    key_dims = tl.arange(0, KEY_TILE)
    value_dims = tl.arange(0, VALUE_TILE)
    queries = tl.load(
        q + head[:, None] * q_head_stride + key_dims[None, :],
        mask=in_tile[:, None] & (key_dims < KEY_DIM)[None, :],
        other=0.0,
    )
    queries, scale = factors(queries, scale, PRODUCT)
    value_size: tl.constexpr = VALUE_DIM // 2 if PAIRED else VALUE_DIM
    nothing = tl.zeros([HEAD_TILE, VALUE_TILE // 2 if PAIRED else VALUE_TILE], tl.float32)
    attended, odd, highest, total = add_keys(
        nothing,
        nothing,
        tl.full([HEAD_TILE], float("-inf"), tl.float32),
        tl.zeros([HEAD_TILE], tl.float32),
        queries,
        tl.zeros([HEAD_TILE], tl.int32) + context - 1,
        begin,
        stop,
        k_cache + kv_head * KEY_DIM,
        v_cache + kv_head * value_size,
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
        PAIRED,
        ENDS=True,
        CAUSAL=False,
    )
    if PAIRED:
        attended = tl.interleave(attended, odd)
    # A row without a context divides zero by one.
    attended = attended / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        parts + part[:, None] * VALUE_DIM + value_dims[None, :],
        attended.to(parts.dtype.element_ty),
        mask=in_tile[:, None] & (value_dims < VALUE_DIM)[None, :],
    )
    if PARTIAL:
        tl.store(sums + part, highest + tl.log2(total), mask=in_tile)


@triton.jit(do_not_specialize=["num_splits", "num_slots"])
def _merge_kernel(
    parts,
    sums,
    out,  # [num_tokens, HEADS, VALUE_DIM]
    seq_lens,
    num_splits,
    num_slots,
    HEADS: tl.constexpr,
    SLOT_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    MIN_PART: tl.constexpr,
    MAX_PART: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Merge the parts of one row and head, each weighted by its share of the sum of exponentials."""
    at = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    context = tl.load(seq_lens + tl.program_id(0))
    _, num_parts = _cut(context, num_splits, num_slots, WINDOW, MIN_PART, MAX_PART, KEYS)
    split = tl.arange(0, SLOT_TILE)
    value_dims = tl.arange(0, VALUE_TILE)
    logarithm = tl.load(sums + at * num_slots + split, mask=split < num_parts, other=float("-inf"))
    filled = logarithm != float("-inf")
    highest = tl.max(tl.where(filled, logarithm, _LOWEST), 0)
    weight = tl.exp2(logarithm - highest)
    part = tl.load(
        parts + (at * num_slots + split)[:, None] * VALUE_DIM + value_dims[None, :],
        mask=filled[:, None] & (value_dims < VALUE_DIM)[None, :],
        other=0.0,
    )
    total = tl.sum(weight, 0)
    merged = tl.sum(part * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + at * VALUE_DIM + value_dims, merged.to(out.dtype.element_ty), mask=value_dims < VALUE_DIM)
