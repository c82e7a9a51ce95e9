"""LoRA adapters: a kernel for A x, and a kernel that adds B (A x), both for all adapters of a step at once.

A program takes a tile of consecutive tokens and one slot, and ends at once if no token of the tile has that slot. So
tokens need no sorting, and a CUDA graph can hold the launches. (Punica, Chen et al. 2023, calls the kernels shrink and
expand.)
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_mp.kernels.triton.interpreter import product_dtype
from vllm_mp.kernels.triton.launch import options, padded

_ROW_TILES = (16, 64)
_MAX_PARTS = 3
_MAX_RANK_TILE = 64


def add_adapters(
    out: Tensor, x: Tensor, adapter_slots: Tensor, a: Tensor, b: Tensor, part_sizes: Sequence[int]
) -> None:
    """See `ops.add_adapters`; a projection has at most three parts."""
    num_tokens, inputs = x.shape
    num_slots, parts, max_rank, _ = a.shape
    if parts > _MAX_PARTS:
        raise ValueError(f"a projection of {parts} parts cannot have adapters in Triton; the limit is {_MAX_PARTS}")
    if not num_tokens:
        return
    if x.stride(1) != 1:
        x = x.contiguous()
    size = next((size for size in _ROW_TILES if num_tokens <= size), _ROW_TILES[-1])
    rank_tile = min(padded(max_rank), _MAX_RANK_TILE)
    rank_tiles = triton.cdiv(max_rank, rank_tile)
    ranked = torch.empty((num_tokens, parts, max_rank), dtype=torch.float32, device=x.device)
    launch = options(f"lora_shrink/{size}", x.device)
    _shrink_kernel[(triton.cdiv(num_tokens, launch["ROWS"]) * rank_tiles, parts, num_slots)](
        x,
        adapter_slots,
        a,
        ranked,
        num_tokens,
        x.stride(0),
        INPUTS=inputs,
        PARTS=parts,
        MAX_RANK=max_rank,
        RANK_TILE=rank_tile,
        FACTOR=product_dtype(x.dtype),
        **launch,
    )
    launch = options(f"lora_expand/{size}", x.device)
    output_tiles = triton.cdiv(max(part_sizes), launch["OUTPUT_TILE"])
    _expand_kernel[(triton.cdiv(num_tokens, launch["ROWS"]) * output_tiles, parts, num_slots)](
        ranked,
        adapter_slots,
        b,
        out,
        num_tokens,
        output_tiles,
        OUTPUTS=out.shape[1],
        FIRST_END=part_sizes[0],
        SECOND_END=sum(part_sizes[:2]),
        PARTS=parts,
        MAX_RANK=max_rank,
        RANK_TILE=rank_tile,
        FACTOR=product_dtype(x.dtype),
        **launch,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _shrink_kernel(
    x,  # [num_tokens, INPUTS], rows `stride` elements apart
    adapter_slots,  # int32 [num_tokens]
    a,  # [num_slots, PARTS, MAX_RANK, INPUTS]
    ranked,  # float32 [num_tokens, PARTS, MAX_RANK]; tokens without an adapter are not written
    num_tokens,
    stride,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    RANK_TILE: tl.constexpr,
    FACTOR: tl.constexpr,
    ROWS: tl.constexpr,
    INPUT_TILE: tl.constexpr,
):
    """Multiply ROWS tokens with RANK_TILE rows of A of one part in one slot."""
    rank_tiles: tl.constexpr = (MAX_RANK + RANK_TILE - 1) // RANK_TILE
    row = (tl.program_id(0) // rank_tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    rank = tl.program_id(0) % rank_tiles * RANK_TILE + tl.arange(0, RANK_TILE)
    part, slot = tl.program_id(1), tl.program_id(2)
    own = tl.load(adapter_slots + row, mask=row < num_tokens, other=-1) == slot
    if tl.max(own.to(tl.int32), 0) == 0:
        return
    in_rank = rank < MAX_RANK
    factors = a + ((slot * PARTS + part) * MAX_RANK + rank).to(tl.int64) * INPUTS
    total = tl.zeros([ROWS, RANK_TILE], tl.float32)
    for first in tl.range(0, INPUTS, INPUT_TILE):
        column = first + tl.arange(0, INPUT_TILE)
        x_mask, a_mask = own[:, None], in_rank[None, :]
        if INPUTS % INPUT_TILE:
            x_mask, a_mask = x_mask & (column < INPUTS)[None, :], a_mask & (column < INPUTS)[:, None]
        rows = tl.load(x + row[:, None] * stride + column[None, :], mask=x_mask, other=0.0)
        of_a = tl.load(factors[None, :] + column[:, None], mask=a_mask, other=0.0)
        total = tl.dot(rows.to(FACTOR), of_a.to(FACTOR), total, input_precision="ieee")
    destination = ranked + (row[:, None] * PARTS + part) * MAX_RANK + rank[None, :]
    tl.store(destination, total, mask=own[:, None] & in_rank[None, :])


@triton.jit(do_not_specialize=["num_tokens", "output_tiles"])
def _expand_kernel(
    ranked,  # float32 [num_tokens, PARTS, MAX_RANK]
    adapter_slots,  # int32 [num_tokens]
    b,  # [num_slots, MAX_RANK, OUTPUTS]
    out,  # [num_tokens, OUTPUTS]
    num_tokens,
    output_tiles,
    OUTPUTS: tl.constexpr,
    FIRST_END: tl.constexpr,
    SECOND_END: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    RANK_TILE: tl.constexpr,
    FACTOR: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUT_TILE: tl.constexpr,
):
    """Add to OUTPUT_TILE outputs of ROWS tokens, in one part, what one slot adds."""
    row = (tl.program_id(0) // output_tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    part, slot = tl.program_id(1), tl.program_id(2)
    own = tl.load(adapter_slots + row, mask=row < num_tokens, other=-1) == slot
    if tl.max(own.to(tl.int32), 0) == 0:
        return
    begin = tl.where(part == 0, 0, tl.where(part == 1, FIRST_END, SECOND_END))
    end = tl.where(part == 0, FIRST_END, tl.where(part == 1, SECOND_END, OUTPUTS))
    output = begin + tl.program_id(0) % output_tiles * OUTPUT_TILE + tl.arange(0, OUTPUT_TILE)
    in_part = output < end
    total = tl.zeros([ROWS, OUTPUT_TILE], tl.float32)
    for first in tl.static_range(0, MAX_RANK, RANK_TILE):
        rank = first + tl.arange(0, RANK_TILE)
        in_rank = rank < MAX_RANK
        of_rows = tl.load(
            ranked + (row[:, None] * PARTS + part) * MAX_RANK + rank[None, :],
            mask=own[:, None] & in_rank[None, :],
            other=0.0,
        )
        of_b = tl.load(
            b + (slot * MAX_RANK + rank[:, None]).to(tl.int64) * OUTPUTS + output[None, :],
            mask=in_rank[:, None] & in_part[None, :],
            other=0.0,
        )
        total = tl.dot(of_rows.to(FACTOR), of_b.to(FACTOR), total, input_precision="ieee")
    destination = out + row[:, None] * OUTPUTS + output[None, :]
    mask = own[:, None] & in_part[None, :]
    total += tl.load(destination, mask=mask, other=0.0).to(tl.float32)
    tl.store(destination, total.to(out.dtype.element_ty), mask=mask)
