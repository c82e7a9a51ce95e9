"""Paged attention for decodes, with their context split over programs.

Every context is cut into the number of parts that keeps the device busy, and a long one into more, so that the batch
does not wait for it. Only the device knows which rows are long; in a captured graph, a program for each part that a row
might have would mostly find nothing to do. So each row has programs of its own for the first parts only, and programs
that serve a group of rows compute the others. A row with a single part needs no merge: its part is the result.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_mp.kernels.attention_metadata import AttentionMetadata
from vllm_mp.kernels.reference import FLOAT8
from vllm_mp.kernels.triton.attention.attended_keys import add_keys, factor_dtype, factors
from vllm_mp.kernels.triton.dependent_launch import prefetched_bytes, start_dependents
from vllm_mp.kernels.triton.launch import (
    MAX_PARTS,
    MIN_HEAD_TILE,
    attention_options,
    num_looping,
    num_slots,
    num_splits,
    options,
    padded,
)

DECODE_SPLITS = (1, *sorted({padded(parts) for parts in range(MIN_HEAD_TILE, MAX_PARTS + 1)}))
"""Numbers of parts, one for each set of kernels that `decode` launches: without a merge, and merges of each tile."""
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
    """Fill `out` [num_tokens, num_heads, value_dim] for the decodes (Flash-Decoding, Dao et al. 2023).

    In a graph of steps with prefills (`metadata.row_counts`), all rows may be decodes. There each program computes
    every n-th part, or merges every n-th group of heads, of those that the step has.
    """
    counted, device = metadata.row_counts is not None, q.device
    rows = len(metadata.seq_lens) if counted else metadata.num_decodes
    num_heads, key_dim = q.shape[1:]
    block_size, num_kv_heads, value_dim = v_cache.shape[1:]
    group = num_heads // num_kv_heads
    heads = min(group, _MAX_HEADS)
    tiles = num_kv_heads * triton.cdiv(group, heads)
    context = min(metadata.max_seq_len, window) if window else metadata.max_seq_len
    splits = metadata.decode_splits or num_splits(rows * tiles, context, device)
    slots = num_slots(rows, splits, context, device)
    parts, sums = out, out
    if slots > 1:
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
    num_programs = tiles * (num_groups * (slots - splits) + rows * splits)
    row_counts = metadata.row_counts if counted else metadata.seq_lens
    _decode_kernel[(num_looping("DECODE", num_programs, device) if counted else num_programs,)](
        q,
        k_cache,
        v_cache.view(torch.int16) if paired else v_cache,
        out,
        parts,
        sums,
        metadata.seq_lens,
        metadata.block_table,
        metadata.block_table.stride(0),
        rows,
        row_counts,
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
        COUNTED=counted,
        GROUP_ROWS=limits["ROWS"],
        PRODUCT=factor_dtype(q, k_cache),
        PAIRED=paired,
        **{**launch, **cut},
    )
    if slots > 1:
        # Most rows of a large batch have one part, so few programs look for those that have more.
        merging = num_looping("MERGE", rows * num_heads, device)
        heads = triton.cdiv(num_heads, max(1, merging // rows))
        num_programs = rows * triton.cdiv(num_heads, heads)
        _merge_kernel[(min(num_programs, merging) if counted else num_programs,)](
            parts,
            sums,
            out,
            metadata.seq_lens,
            row_counts,
            splits,
            slots,
            heads,
            HEADS=num_heads,
            SLOT_TILE=padded(slots),
            VALUE_DIM=value_dim,
            VALUE_TILE=padded(value_dim),
            COUNTED=counted,
            DEPENDENTS=prefetched_bytes(device) > 0,
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
    out,  # [num_tokens, num_heads, VALUE_DIM], written for rows with one part
    parts,  # float32 [num_rows, num_heads, num_slots, VALUE_DIM] if PARTIAL
    sums,  # float32 [num_rows, num_heads, num_slots] if PARTIAL, log2 of each part's sum of exponentials
    seq_lens,
    block_table,
    table_stride,
    num_rows,
    row_counts,  # if COUNTED, begins with the number of rows
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
    COUNTED: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    PRODUCT: tl.constexpr,
    PAIRED: tl.constexpr,
    WINDOW: tl.constexpr,
    MIN_PART: tl.constexpr,
    MAX_PART: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Attend to parts: one for each program or, if COUNTED, every n-th of the step, where n counts the programs."""
    first = tl.program_id(0)
    stop = first + 1
    step = 1
    if COUNTED:
        num_rows = tl.load(row_counts)
        of_rows = tl.cdiv(num_rows, GROUP_ROWS) * (num_slots - num_splits) + num_rows * num_splits
        stop = of_rows * (KV_HEADS * ((GROUP + HEADS - 1) // HEADS))
        step = tl.num_programs(0)
    for program in tl.range(first, stop, step):
        _attend_rows(
            program,
            q,
            k_cache,
            v_cache,
            out,
            parts,
            sums,
            seq_lens,
            block_table,
            table_stride,
            num_rows,
            num_splits,
            num_slots,
            scale,
            soft_cap,
            q_token_stride,
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
            GROUP_ROWS,
            PRODUCT,
            PAIRED,
            WINDOW,
            MIN_PART,
            MAX_PART,
            KEYS,
        )


@triton.jit
def _attend_rows(
    program,
    q,
    k_cache,
    v_cache,
    out,
    parts,
    sums,
    seq_lens,
    block_table,
    table_stride,
    num_rows,
    num_splits,
    num_slots,
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

    The number `program` says which; HEADS of the query heads that share a KV head are computed. The KV heads of a token
    share lines of memory, so their programs run side by side.
    """
    tiles: tl.constexpr = KV_HEADS * ((GROUP + HEADS - 1) // HEADS)
    kv_head = program % tiles % KV_HEADS
    first_head = program % tiles // KV_HEADS * HEADS
    at = program // tiles
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
            out,
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
    out,
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
    part, num_parts = _cut(context, num_splits, num_slots, WINDOW, MIN_PART, MAX_PART, KEYS)
    oldest = 0
    if WINDOW > 0:
        oldest = tl.maximum(context - WINDOW, 0)
    begin = oldest + split * part
    stop = tl.minimum(begin + part, context)

    in_group = first_head + tl.arange(0, HEAD_TILE)
    in_tile = (tl.arange(0, HEAD_TILE) < HEADS) & (in_group < GROUP)
    head = kv_head * GROUP + in_group
    num_heads = KV_HEADS * GROUP
    vector = row * num_heads + head
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
    in_out = in_tile[:, None] & (value_dims < VALUE_DIM)[None, :]
    if PARTIAL and num_parts != 1:
        slot = vector * num_slots + split
        tl.store(parts + slot[:, None] * VALUE_DIM + value_dims[None, :], attended, mask=in_out)
        tl.store(sums + slot, highest + tl.log2(total), mask=in_tile)
    else:
        to = out + vector[:, None] * VALUE_DIM + value_dims[None, :]
        tl.store(to, attended.to(out.dtype.element_ty), mask=in_out)


@triton.jit(do_not_specialize=["num_splits", "num_slots", "num_heads"])
def _merge_kernel(
    parts,
    sums,
    out,  # [num_tokens, HEADS, VALUE_DIM]
    seq_lens,
    row_counts,  # if COUNTED, begins with the number of rows
    num_splits,
    num_slots,
    num_heads,  # of a program
    HEADS: tl.constexpr,
    SLOT_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    COUNTED: tl.constexpr,
    DEPENDENTS: tl.constexpr,
    WINDOW: tl.constexpr,
    MIN_PART: tl.constexpr,
    MAX_PART: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Merge the parts of some heads of one row in each program or, if COUNTED, of every n-th such group of the step."""
    start_dependents(DEPENDENTS)
    groups = tl.cdiv(HEADS, num_heads)
    first = tl.program_id(0)
    stop = first + 1
    step = 1
    if COUNTED:
        stop = tl.load(row_counts) * groups
        step = tl.num_programs(0)
    for at in tl.range(first, stop, step):
        row = tl.cast(at // groups, tl.int64)
        _, num_parts = _cut(tl.load(seq_lens + row), num_splits, num_slots, WINDOW, MIN_PART, MAX_PART, KEYS)
        head = at % groups * num_heads
        # A row with one part has its result already.
        end = tl.where(num_parts == 1, head, tl.minimum(head + num_heads, HEADS))
        while head < end:
            _merge_parts(row * HEADS + head, num_parts, parts, sums, out, num_slots, SLOT_TILE, VALUE_DIM, VALUE_TILE)
            head += 1


@triton.jit
def _merge_parts(
    vector,
    num_parts,
    parts,
    sums,
    out,
    num_slots,
    SLOT_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
):
    """Merge the parts of one row and head, each weighted by its share of the sum of exponentials."""
    split = tl.arange(0, SLOT_TILE)
    value_dims = tl.arange(0, VALUE_TILE)
    logarithm = tl.load(sums + vector * num_slots + split, mask=split < num_parts, other=float("-inf"))
    filled = logarithm != float("-inf")
    highest = tl.max(tl.where(filled, logarithm, _LOWEST), 0)
    weight = tl.exp2(logarithm - highest)
    part = tl.load(
        parts + (vector * num_slots + split)[:, None] * VALUE_DIM + value_dims[None, :],
        mask=filled[:, None] & (value_dims < VALUE_DIM)[None, :],
        other=0.0,
    )
    total = tl.sum(weight, 0)
    merged = tl.sum(part * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + vector * VALUE_DIM + value_dims, merged.to(out.dtype.element_ty), mask=value_dims < VALUE_DIM)
