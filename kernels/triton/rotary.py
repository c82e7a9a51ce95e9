"""Rotary embedding and writes to the paged cache, which share one pass over keys and values.

Products and sums are not fused to one operation with one rounding, so rotated heads equal those of the definition to
the bit; the kernels wait for memory, not for arithmetic.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_mp.kernels.triton.float8 import stored
from vllm_mp.kernels.triton.launch import options


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> tuple[Tensor, Tensor]:
    """See `ops.rotary`."""
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    for x, out in ((q, q_out), (k, k_out)):
        x = _with_contiguous_heads(x)
        num_tokens, num_heads, dim = x.shape
        if num_tokens:
            heads, tiles, launch = _tiles(num_heads, dim, x.device)
            _rotary_kernel[(num_tokens, tiles)](
                x,
                positions,
                cos_sin_cache,
                out,
                x.stride(0),
                x.stride(1),
                num_heads,
                DIM=dim,
                **_rotated_part(dim, cos_sin_cache),
                HEADS=heads,
                enable_fp_fusion=False,
                **launch,
            )
    return q_out, k_out


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, cell_mapping: Tensor) -> None:
    """See `ops.write_kv`; padding has a negative cell and is not written."""
    if not k.shape[0]:
        return
    k, v = _with_contiguous_heads(k), _with_contiguous_heads(v)
    num_tokens, num_heads, key_dim = k.shape
    value_dim = v.shape[2]
    heads, tiles, launch = _tiles(num_heads, max(key_dim, value_dim), k.device)
    _write_kernel[(num_tokens, tiles)](
        k,
        v,
        k_cache,
        v_cache,
        cell_mapping,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        num_heads,
        KEY_DIM=key_dim,
        KEY_TILE=triton.next_power_of_2(key_dim),
        VALUE_DIM=value_dim,
        VALUE_TILE=triton.next_power_of_2(value_dim),
        HEADS=heads,
        **launch,
    )


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
    """See `ops.rotary_write_kv`; padding has a negative cell and is not written."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not q.shape[0]:
        return out
    q, k, v = (_with_contiguous_heads(x) for x in (q, k, v))
    num_tokens, num_heads, key_dim = q.shape
    num_kv_heads, value_dim = k.shape[1], v.shape[2]
    heads, tiles, launch = _tiles(num_heads, max(key_dim, value_dim), q.device)
    _rotary_write_kernel[(num_tokens, tiles + triton.cdiv(num_kv_heads, heads))](
        q,
        k,
        v,
        positions,
        cos_sin_cache,
        out,
        k_cache,
        v_cache,
        cell_mapping,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        num_heads,
        num_kv_heads,
        QUERY_TILES=tiles,
        DIM=key_dim,
        **_rotated_part(key_dim, cos_sin_cache),
        VALUE_DIM=value_dim,
        VALUE_TILE=triton.next_power_of_2(value_dim),
        HEADS=heads,
        enable_fp_fusion=False,
        **launch,
    )
    return out


def _with_contiguous_heads(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def _rotated_part(dim: int, cos_sin_cache: Tensor) -> dict[str, int]:
    """Return the sizes of the halves that are rotated, and of the rest of a head of `dim` elements."""
    half = cos_sin_cache.shape[1] // 2
    rest = dim - 2 * half
    return {"HALF": half, "HALF_TILE": triton.next_power_of_2(half), "REST_TILE": triton.next_power_of_2(rest)}


def _tiles(num_heads: int, dim: int, device: torch.device) -> tuple[int, int, dict[str, int]]:
    """Return the heads of `dim` elements per program, the programs per token, and their options."""
    launch = dict(options("heads", device))
    heads = max(1, launch.pop("ELEMENTS") // triton.next_power_of_2(dim))
    heads = min(heads, triton.next_power_of_2(num_heads))
    return heads, triton.cdiv(num_heads, heads), launch


@triton.jit
def _rotated(heads, mask, position, cos_sin_cache, HALF: tl.constexpr, HALF_TILE: tl.constexpr):
    """Return the halves of the heads at `heads`, rotated by the angles of `position`; equal to a CPU's to the bit.

    Each product is rounded to the dtype of the heads, and so is their sum, as torch rounds the operations of
    `reference.rotary`.
    """
    frequency = tl.arange(0, HALF_TILE)
    table = cos_sin_cache + position * (2 * HALF) + frequency
    cos = tl.load(table, mask=frequency < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(table + HALF, mask=frequency < HALF, other=0.0).to(tl.float32)[None, :]
    dtype = heads.dtype.element_ty
    low = tl.load(heads, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(heads + HALF, mask=mask, other=0.0).to(tl.float32)
    new_low = (low * cos).to(dtype).to(tl.float32) - (high * sin).to(dtype).to(tl.float32)
    new_high = (high * cos).to(dtype).to(tl.float32) + (low * sin).to(dtype).to(tl.float32)
    return new_low.to(dtype), new_high.to(dtype)


@triton.jit(do_not_specialize=["num_heads"])
def _rotary_kernel(
    x,  # [num_tokens, num_heads, DIM]
    positions,
    cos_sin_cache,
    out,  # like x, contiguous
    token_stride,
    head_stride,
    num_heads,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    REST_TILE: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Rotate HEADS heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, HALF_TILE)
    mask = (head < num_heads)[:, None] & (column < HALF)[None, :]
    low, high = _rotated(
        x + token * token_stride + head[:, None] * head_stride + column[None, :],
        mask,
        tl.load(positions + token),
        cos_sin_cache,
        HALF,
        HALF_TILE,
    )
    own = out + token * num_heads * DIM
    destination = own + head[:, None] * DIM + column[None, :]
    tl.store(destination, low, mask=mask)
    tl.store(destination + HALF, high, mask=mask)
    if REST_TILE:
        rest = x + token * token_stride + 2 * HALF
        _copy_heads(rest, head_stride, own + 2 * HALF, DIM, head, num_heads, DIM - 2 * HALF, REST_TILE)


@triton.jit
def _copy_heads(x, head_stride, out, out_stride, head, num_heads, DIM: tl.constexpr, TILE: tl.constexpr):
    """Copy DIM elements of the existing heads among `head` of one token from `x` to `out`."""
    column = tl.arange(0, TILE)
    mask = (head < num_heads)[:, None] & (column < DIM)[None, :]
    value = tl.load(x + head[:, None] * head_stride + column[None, :], mask=mask)
    tl.store(out + head[:, None] * out_stride + column[None, :], stored(value, out), mask=mask)


@triton.jit(do_not_specialize=["num_heads"])
def _write_kernel(
    k,  # [num_tokens, num_heads, KEY_DIM]
    v,  # [num_tokens, num_heads, VALUE_DIM]
    k_cache,
    v_cache,
    cell_mapping,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    num_heads,
    KEY_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Write HEADS heads of one token's keys and values."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    cell = tl.load(cell_mapping + token)
    if cell < 0:
        return
    start = cell * num_heads
    keys, values = k_cache + start * KEY_DIM, v_cache + start * VALUE_DIM
    _copy_heads(k + token * k_token_stride, k_head_stride, keys, KEY_DIM, head, num_heads, KEY_DIM, KEY_TILE)
    _copy_heads(v + token * v_token_stride, v_head_stride, values, VALUE_DIM, head, num_heads, VALUE_DIM, VALUE_TILE)


@triton.jit(do_not_specialize=["num_heads", "num_kv_heads"])
def _rotary_write_kernel(
    q,  # [num_tokens, num_heads, DIM]
    k,  # [num_tokens, num_kv_heads, DIM]
    v,  # [num_tokens, num_kv_heads, VALUE_DIM]
    positions,
    cos_sin_cache,
    out,  # like q, contiguous
    k_cache,
    v_cache,
    cell_mapping,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    num_heads,
    num_kv_heads,
    QUERY_TILES: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    REST_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Process HEADS heads of one token: of its queries, or of its keys and values."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    column = tl.arange(0, HALF_TILE)
    if tl.program_id(1) < QUERY_TILES:
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        mask = (head < num_heads)[:, None] & (column < HALF)[None, :]
        heads = q + token * q_token_stride + head[:, None] * q_head_stride + column[None, :]
        low, high = _rotated(heads, mask, position, cos_sin_cache, HALF, HALF_TILE)
        own = out + token * num_heads * DIM
        destination = own + head[:, None] * DIM + column[None, :]
        tl.store(destination, low, mask=mask)
        tl.store(destination + HALF, high, mask=mask)
        if REST_TILE:
            rest = q + token * q_token_stride + 2 * HALF
            _copy_heads(rest, q_head_stride, own + 2 * HALF, DIM, head, num_heads, DIM - 2 * HALF, REST_TILE)
    else:
        cell = tl.load(cell_mapping + token)
        if cell >= 0:
            head = (tl.program_id(1) - QUERY_TILES) * HEADS + tl.arange(0, HEADS)
            mask = (head < num_kv_heads)[:, None] & (column < HALF)[None, :]
            heads = k + token * k_token_stride + head[:, None] * k_head_stride + column[None, :]
            low, high = _rotated(heads, mask, position, cos_sin_cache, HALF, HALF_TILE)
            keys = k_cache + cell * num_kv_heads * DIM
            destination = keys + head[:, None] * DIM + column[None, :]
            tl.store(destination, stored(low, k_cache), mask=mask)
            tl.store(destination + HALF, stored(high, k_cache), mask=mask)
            if REST_TILE:
                rest = k + token * k_token_stride + 2 * HALF
                _copy_heads(rest, k_head_stride, keys + 2 * HALF, DIM, head, num_kv_heads, DIM - 2 * HALF, REST_TILE)
            values = v_cache + cell * num_kv_heads * VALUE_DIM
            _copy_heads(
                v + token * v_token_stride, v_head_stride, values, VALUE_DIM, head, num_kv_heads, VALUE_DIM, VALUE_TILE
            )
