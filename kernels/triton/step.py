"""The columns of a step: a program copies some elements of all of them, or of one row of the block table."""

import triton
import triton.language as tl
from torch import Tensor

from vllm_mp.kernels.step_columns import StepColumns
from vllm_mp.kernels.triton.launch import options


def fill_awaited(input_ids: Tensor, latest: Tensor) -> None:
    """See `ops.fill_awaited`."""
    launch = options("elementwise", input_ids.device)
    _fill_awaited_kernel[(triton.cdiv(len(input_ids), launch["ELEMENTS"]),)](
        input_ids, latest, len(input_ids), **launch
    )


def copy_step(step: StepColumns, buffers: StepColumns, num_decodes: int, latest: Tensor | None = None) -> None:
    """See `ops.copy_step`."""
    launch = options("elementwise", step.input_ids.device)
    num_rows, width = step.block_table.shape
    longest = max(len(buffers.input_ids), len(buffers.query_start), width)
    _copy_step_kernel[(1 + num_rows, triton.cdiv(longest, launch["ELEMENTS"]))](
        step.input_ids,
        step.positions,
        step.cell_mapping,
        step.query_start,
        step.seq_lens,
        step.block_table,
        step.seq_lens if step.adapter_slots is None else step.adapter_slots,
        buffers.input_ids,
        buffers.positions,
        buffers.cell_mapping,
        buffers.query_start,
        buffers.seq_lens,
        buffers.block_table,
        buffers.seq_lens if buffers.adapter_slots is None else buffers.adapter_slots,
        buffers.row_counts,
        step.input_ids if latest is None else latest,
        len(step.input_ids),
        num_rows,
        num_decodes,
        width,
        len(buffers.input_ids),
        len(buffers.seq_lens),
        step.block_table.stride(0),
        buffers.block_table.stride(0),
        0 if step.adapter_slots is None else len(step.input_ids),
        ADAPTERS=buffers.adapter_slots is not None,
        **launch,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _fill_awaited_kernel(input_ids, latest, num_tokens, ELEMENTS: tl.constexpr):
    """Replace the awaited ids among ELEMENTS tokens."""
    token = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    ids = tl.load(input_ids + token, mask=token < num_tokens, other=0)
    awaited = tl.load(latest + (-1 - ids), mask=ids < 0, other=0)
    tl.store(input_ids + token, tl.maximum(awaited, 0), mask=ids < 0)


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "num_rows",
        "num_decodes",
        "width",
        "all_tokens",
        "all_rows",
        "table_stride",
        "to_table_stride",
        "num_slots",
    ]
)
def _copy_step_kernel(
    input_ids,
    positions,
    cell_mapping,
    query_start,
    seq_lens,
    block_table,
    adapter_slots,
    to_input_ids,
    to_positions,
    to_cell_mapping,
    to_query_start,
    to_seq_lens,
    to_block_table,
    to_adapter_slots,
    to_row_counts,
    latest,  # not read if no id is negative
    num_tokens,
    num_rows,
    num_decodes,
    width,
    all_tokens,  # of the buffers, as is `all_rows`
    all_rows,
    table_stride,
    to_table_stride,
    num_slots,  # elements of `adapter_slots`: all tokens of the step, or none
    ADAPTERS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Copy ELEMENTS elements of the columns, or of one row of the block table."""
    at = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    if tl.program_id(0) > 0:
        row = tl.program_id(0).to(tl.int64) - 1
        blocks = tl.load(block_table + row * table_stride + at, mask=at < width)
        tl.store(to_block_table + row * to_table_stride + at, blocks, mask=at < width)
        return
    is_token = at < num_tokens
    ids = tl.load(input_ids + at, mask=is_token, other=0)
    ids = tl.where(ids < 0, tl.maximum(tl.load(latest + (-1 - ids), mask=ids < 0, other=0), 0), ids)
    tl.store(to_input_ids + at, ids, mask=is_token)
    tl.store(to_positions + at, tl.load(positions + at, mask=is_token), mask=is_token)
    tl.store(to_cell_mapping + at, tl.load(cell_mapping + at, mask=is_token, other=0), mask=at < all_tokens)
    if ADAPTERS:
        tl.store(
            to_adapter_slots + at, tl.load(adapter_slots + at, mask=at < num_slots, other=-1), mask=at < all_tokens
        )
    starts = tl.load(query_start + at, mask=at <= num_rows, other=0)
    tl.store(to_query_start + at, tl.where(at <= num_rows, starts, num_tokens), mask=at <= all_rows)
    lens = tl.load(seq_lens + at, mask=at < num_rows, other=0)
    tl.store(to_seq_lens + at, lens, mask=at < all_rows)
    tl.store(to_row_counts + at, tl.where(at == 0, num_decodes, num_rows), mask=at < 2)
