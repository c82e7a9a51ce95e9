"""The columns of a step on the device, and their way into the buffers of a graph, defined in plain torch."""

from typing import NamedTuple

from torch import Tensor


class StepColumns(NamedTuple):
    """What a model and its attention read of a step, or buffers for up to so many tokens and rows."""

    input_ids: Tensor  # int64 [num_tokens]; -1 - i stands for token i of those that were sampled last
    positions: Tensor  # int64 [num_tokens]
    cell_mapping: Tensor  # int64 [num_tokens]
    query_start: Tensor  # int32 [num_rows + 1]
    seq_lens: Tensor  # int32 [num_rows]
    block_table: Tensor  # int32 [num_rows, max_blocks], rows of contiguous elements
    adapter_slots: Tensor | None  # int32 [num_tokens]; None if no token has an adapter
    row_counts: Tensor | None = None  # int32 [2], buffers only: see `AttentionMetadata.row_counts`


def fill_awaited(input_ids: Tensor, latest: Tensor) -> None:
    """Replace each id -1 - i of `input_ids` int64 [num_tokens] by `latest[i]`, in place. All other ids stay.

    `latest` int64 [n] holds the tokens that were sampled last. A negative one, of a row that got no token, becomes 0.
    """
    is_awaited = input_ids < 0
    input_ids.copy_(latest[(-1 - input_ids).clamp_(min=0)].clamp_(min=0).where(is_awaited, input_ids))


def copy_step(step: StepColumns, buffers: StepColumns, num_decodes: int, latest: Tensor | None = None) -> None:
    """Copy the columns of `step` to the beginnings of `buffers`, which have room for it, and pad it.

    `buffers.row_counts` gets `num_decodes`, the number of decodes, and the number of rows.

    Tokens of padding get cell 0 and adapter slot -1, and keep arbitrary ids and positions that are in range; rows of
    padding get no tokens and the context 0. Columns of `buffers.block_table` beyond those of the step stay as they are.
    `latest` as for `fill_awaited`, which is applied to the copied ids; None if no token is awaited.
    """
    num_tokens, (num_rows, width) = len(step.input_ids), step.block_table.shape
    buffers.input_ids[:num_tokens].copy_(step.input_ids)
    if latest is not None:
        fill_awaited(buffers.input_ids[:num_tokens], latest)
    buffers.positions[:num_tokens].copy_(step.positions)
    _padded(buffers.cell_mapping, step.cell_mapping, 0)
    _padded(buffers.query_start, step.query_start, num_tokens)
    _padded(buffers.seq_lens, step.seq_lens, 0)
    assert buffers.row_counts is not None
    buffers.row_counts[0].fill_(num_decodes)
    buffers.row_counts[1].fill_(num_rows)
    buffers.block_table[:num_rows, :width].copy_(step.block_table)
    if buffers.adapter_slots is not None:
        _padded(buffers.adapter_slots, step.adapter_slots, -1)


def _padded(buffer: Tensor | None, column: Tensor | None, padding: int) -> None:
    assert buffer is not None
    count = 0 if column is None else len(column)
    buffer[count:].fill_(padding)
    if column is not None:
        buffer[:count].copy_(column)
