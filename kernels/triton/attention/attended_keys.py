"""The loop of paged attention over tiles of keys, which decodes and prefills share.

The softmax runs along the context (Milakov & Gimelshein 2018, FlashAttention, Dao et al. 2022).
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_mp.kernels.reference import FLOAT8
from vllm_mp.kernels.triton.float8 import from_float8, from_float8_pairs
from vllm_mp.kernels.triton.interpreter import product_dtype

_LOG2_E = tl.constexpr(math.log2(math.e))
_HEADROOM = tl.constexpr(15.0)
"""Weights are at most 2 to this power, because float16 rounds numbers below 2**-24 to zero."""


def factor_dtype(q: Tensor, cache: Tensor) -> tl.dtype:
    """Return the dtype of the factors of the products; float16 holds 8-bit floats exactly, and takes fewer steps."""
    return product_dtype(torch.float16 if cache.dtype == FLOAT8 and q.dtype == torch.bfloat16 else q.dtype)


@triton.jit
def factors(queries, scale, DTYPE: tl.constexpr):
    """Return `queries` [ROWS, KEY_TILE] in DTYPE, and the scale of their products with keys: `scale`, or [ROWS, 1].

    A row of bfloat16 that becomes another type is divided by a power of two: its largest element then lies in [1, 2).
    """
    if queries.dtype == tl.bfloat16 and queries.dtype != DTYPE:
        queries = queries.to(tl.float32)
        largest = tl.max(tl.abs(queries), 1)
        exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 1), 253)
        divided = queries * ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
        return divided.to(DTYPE), ((exponent << 23).to(tl.float32, bitcast=True) * scale)[:, None]
    else:
        return queries.to(DTYPE), scale


@triton.jit
def add_keys(
    attended,  # float32 [ROWS, VALUE_TILE], the sum of values so far, each times exp(score - highest)
    odd,  # if PAIRED, the same for the elements with odd indices [ROWS, VALUE_TILE / 2]; `attended` has the even ones
    highest,  # float32 [ROWS], the highest score so far, in units of ln 2, less the headroom
    total,  # float32 [ROWS], the sum of exp(score - highest) so far
    q,  # [ROWS, KEY_TILE]
    query_at,  # int32 [ROWS], the position of each query
    last_at,  # int32 [ROWS], that of the last key which it sees
    begin,
    stop,
    k_head,
    v_head,
    blocks,
    scale,  # a number, or [ROWS, 1]
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
    PAIRED: tl.constexpr,  # whether `v_head` points to pairs of 8-bit floats
    ENDS: tl.constexpr,  # whether the last tile of keys may reach past `stop`
    CAUSAL: tl.constexpr,  # whether some queries must not see some of the keys
):
    """Attend to the keys at positions [begin, stop) of the row whose blocks are at `blocks`."""
    key_dims = tl.arange(0, KEY_TILE)
    value_size: tl.constexpr = VALUE_DIM // 2 if PAIRED else VALUE_DIM
    value_dims = tl.arange(0, VALUE_TILE // 2 if PAIRED else VALUE_TILE)
    key_at = begin + tl.arange(0, KEYS)
    block = tl.load(blocks + key_at // BLOCK_SIZE, mask=key_at < stop, other=0)
    for at in tl.range(begin, stop, KEYS):
        key_at = at + tl.arange(0, KEYS)
        if ENDS:
            # Cells beyond `stop` belong to other requests or are unwritten, and are not read: zero times NaN is NaN.
            inside = key_at < stop
            k_mask = inside[None, :] & (key_dims < KEY_DIM)[:, None]
            v_mask = inside[:, None] & (value_dims < value_size)[None, :]
        else:
            k_mask = (key_dims < KEY_DIM)[:, None]
            v_mask = (value_dims < value_size)[None, :]
        cell = block * BLOCK_SIZE + key_at % BLOCK_SIZE
        # The next blocks are looked up one step ahead, so that copies of keys and values wait for no other load.
        block = tl.load(blocks + (key_at + KEYS) // BLOCK_SIZE, mask=key_at + KEYS < stop, other=0)
        k_cell = k_head + cell[None, :].to(tl.int64) * (KV_HEADS * KEY_DIM)
        k = tl.load(k_cell + key_dims[:, None], mask=k_mask, other=0.0)
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
            seen = key_at[None, :] <= last_at[:, None]
            if WINDOW > 0:
                seen = seen & (key_at[None, :] > query_at[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        elif ENDS:
            scores = tl.where(inside[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1) - _HEADROOM)
        # A query that has seen no key yet must not subtract infinity from infinity.
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - base[:, None])
        rescale = tl.exp2(highest - base)
        total = total * rescale + tl.sum(weights, 1)
        v_cell = v_head + cell[:, None].to(tl.int64) * (KV_HEADS * value_size)
        v = tl.load(v_cell + value_dims[None, :], mask=v_mask, other=0.0)
        if PAIRED:
            # Tensor cores take rows of 16 bits from shared memory, but rows of 8 bits only one by one.
            weights = weights.to(PRODUCT)
            v, odd_v = from_float8_pairs(v, PRODUCT)
            odd = tl.dot(weights, odd_v, odd * rescale[:, None], input_precision="ieee")
        else:
            v = from_float8(v, PRODUCT)
        if CAUSAL:
            # Zero times NaN is NaN, so a value that is not finite is replaced by zero, and the weights of the queries
            # that see it become NaN.
            is_not_finite = tl.max((~(tl.abs(v) < float("inf"))).to(tl.int32), 1) > 0
            weights = tl.where(seen & is_not_finite[None, :], float("nan"), weights)
            v = tl.where(is_not_finite[:, None], 0.0, v)
        attended = tl.dot(weights.to(PRODUCT), v, attended * rescale[:, None], input_precision="ieee")
        highest = new_highest
    return attended, odd, highest, total
