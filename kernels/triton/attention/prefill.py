"""Paged attention for prefills, in tiles of queries."""

import triton
import triton.language as tl
from torch import Tensor

from vllm_mp.kernels.attention_metadata import AttentionMetadata
from vllm_mp.kernels.triton.attention.attended_keys import add_keys, factor_dtype, factors
from vllm_mp.kernels.triton.launch import attention_options, num_looping, padded


def prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    out: Tensor,
) -> None:
    """Fill `out` [num_tokens, num_heads, value_dim] for the prefills: all rows but decodes.

    A tile holds the same number of tokens in every row of the step, and each row begins a tile of its own. Prefill i,
    whose first token is token s of all prefills, has the tiles from s // tokens + i on, as many as it needs. In a graph
    (`metadata.row_counts`) each program computes every n-th tile that the step has.
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
    num_head_tiles = num_kv_heads * triton.cdiv(group, heads)
    counted, ends = metadata.row_counts is not None, metadata.attention_ends
    looping = num_looping("PREFILL", num_tiles * num_head_tiles, q.device)
    _prefill_kernel[(looping,) if counted else (num_tiles, num_head_tiles)](
        q,
        k_cache,
        v_cache,
        out,
        metadata.query_start,
        metadata.seq_lens,
        metadata.block_table,
        metadata.block_table.stride(0),
        num_decodes,
        metadata.seq_lens.shape[0],
        q.shape[0],
        metadata.row_counts if counted else metadata.seq_lens,
        metadata.seq_lens if ends is None else ends,
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
        COUNTED=counted,
        ENDED=ends is not None,
        PRODUCT=factor_dtype(q, k_cache),
        **launch,
    )


@triton.jit(do_not_specialize=["table_stride", "num_decodes", "num_rows", "num_tokens"])
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
    num_rows,
    num_tokens,
    row_counts,  # if COUNTED, the numbers of decodes and of rows, else both are arguments
    attention_ends,  # if ENDED, int32 [num_tokens], else queries see the keys up to their own
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
    COUNTED: tl.constexpr,
    ENDED: tl.constexpr,
    PRODUCT: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Compute a tile: one for each program or, if COUNTED, every n-th tile of the step, where n counts the programs."""
    first = tl.program_id(0)
    stop = first + 1
    step = 1
    head_tiles: tl.constexpr = KV_HEADS * ((GROUP + HEADS - 1) // HEADS)
    if COUNTED:
        num_decodes = tl.load(row_counts)
        num_rows = tl.load(row_counts + 1)
        num_tokens = tl.load(query_start + num_rows)
    num_prefills = num_rows - num_decodes
    num_tiles = (num_tokens - num_decodes) // TOKENS + num_prefills
    if COUNTED:
        stop = num_tiles * head_tiles
        step = tl.num_programs(0)
    for at in tl.range(first, stop, step):
        # The last tiles of a prompt take longest, so they begin first.
        tile = num_tiles - 1 - (at // head_tiles if COUNTED else at)
        head_tile = at % head_tiles if COUNTED else tl.program_id(1)
        row, token, end = _find_tile(query_start, num_decodes, num_prefills, tile, TOKENS)
        if token < end:
            _attend_tile(
                q,
                k_cache,
                v_cache,
                out,
                seq_lens,
                attention_ends,
                block_table,
                table_stride,
                row,
                token,
                end,
                head_tile,
                scale,
                soft_cap,
                q_token_stride,
                q_head_stride,
                TOKENS,
                GROUP,
                HEADS,
                KV_HEADS,
                KEY_DIM,
                KEY_TILE,
                VALUE_DIM,
                VALUE_TILE,
                BLOCK_SIZE,
                WINDOW,
                CAPPED,
                ENDED,
                PRODUCT,
                ROWS,
                KEYS,
            )


@triton.jit
def _find_tile(query_start, num_decodes, num_prefills, tile, TOKENS: tl.constexpr):
    """Return the row and the first token of `tile`, and the end of the row, which is not beyond an empty tile."""
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
    return row, first + (tile - first_tile) * TOKENS, end


@triton.jit
def _attend_tile(
    q,
    k_cache,
    v_cache,
    out,
    seq_lens,
    attention_ends,
    block_table,
    table_stride,
    row,
    token,
    end,
    head_tile,
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
    ENDED: tl.constexpr,
    PRODUCT: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Compute TOKENS consecutive queries of one row, for HEADS of the query heads that share a KV head."""
    kv_head = head_tile % KV_HEADS
    first_head = head_tile // KV_HEADS * HEADS
    context = tl.load(seq_lens + row)
    in_row = tl.arange(0, ROWS) // HEADS
    in_group = first_head + tl.arange(0, ROWS) % HEADS
    in_tile = (in_row < TOKENS) & (token + in_row < end) & (in_group < GROUP)
    head = kv_head * GROUP + in_group
    first_at = context - (end - token)
    query_at = first_at + in_row
    last_at = query_at
    stop = tl.minimum(first_at + TOKENS, context)
    if ENDED:
        ends = tl.load(attention_ends + token + in_row, mask=in_tile, other=0)
        last_at = tl.where(in_tile, ends - 1, query_at)
        stop = tl.max(ends, 0)

    key_dims = tl.arange(0, KEY_TILE)
    value_dims = tl.arange(0, VALUE_TILE)
    queries = tl.load(
        q + (token + in_row).to(tl.int64)[:, None] * q_token_stride + head[:, None] * q_head_stride + key_dims[None, :],
        mask=in_tile[:, None] & (key_dims < KEY_DIM)[None, :],
        other=0.0,
    )
    queries, scale = factors(queries, scale, PRODUCT)
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
        attended, _, highest, total = add_keys(
            attended,
            attended,
            highest,
            total,
            queries,
            query_at,
            last_at,
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
            PAIRED=False,
            ENDS=True,
            CAUSAL=True,
        )
    newest = seen_by_all + tl.maximum(first_at + 1 - seen_by_all, 0) // KEYS * KEYS
    attended, _, highest, total = add_keys(
        attended,
        attended,
        highest,
        total,
        queries,
        query_at,
        last_at,
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
        PAIRED=False,
        ENDS=False,
        CAUSAL=False,
    )
    attended, _, highest, total = add_keys(
        attended,
        attended,
        highest,
        total,
        queries,
        query_at,
        last_at,
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
        PAIRED=False,
        ENDS=True,
        CAUSAL=True,
    )
    attended = attended / total[:, None]
    vector = (token + in_row).to(tl.int64) * (KV_HEADS * GROUP) + head
    tl.store(
        out + vector[:, None] * VALUE_DIM + value_dims[None, :],
        attended.to(out.dtype.element_ty),
        mask=in_tile[:, None] & (value_dims < VALUE_DIM)[None, :],
    )
