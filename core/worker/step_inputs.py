"""A scheduled step token by token, as the model and its attention read it."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_mp.core.lora.cached_adapter import NO_SLOT
from vllm_mp.core.scheduler.batch import Counts, Rows
from vllm_mp.core.scheduler.step import ScheduledStep
from vllm_mp.kernels.ops import AttentionMetadata


class StepRows(Protocol):
    """The columns of a batch that a step reads; `core.scheduler.batch.Batch` describes them."""

    token_ids: npt.NDArray[np.int32]
    block_table: npt.NDArray[np.int32]
    num_computed_tokens: Counts
    adapter_slot: npt.NDArray[np.int32]
    second_text_at: npt.NDArray[np.int64]
    rope_positions: npt.NDArray[np.int32] | None


_SPARE_BLOCKS = 8
"""Blocks that each row of a repeated step can begin before its inputs are laid out again."""
ToDevice = Callable[[Sequence[npt.NDArray[Any]]], Sequence[Tensor]]
"""Returns arrays on the device, as `host_copies.all_to_device` does."""


def step_inputs(
    step: ScheduledStep, batch: StepRows, block_size: int, to_device: ToDevice, spare_blocks: int = 0
) -> tuple[Tensor, Tensor, AttentionMetadata]:
    """Return token ids and positions, int64 [num_tokens] each, and what attention reads, on the device.

    The positions are [3, num_tokens] (`Batch.rope_positions`) if a token has several.
    A token that the step awaits (`step.awaits`) has the id -1 - its index in `step.awaited`, for `ops.fill_awaited`.
    The block table has room for up to `spare_blocks` more blocks than the longest row has.
    """
    rows, counts = step.rows, step.counts
    ends = np.cumsum(counts)
    computed = batch.num_computed_tokens[rows]
    # [num_tokens], as are `input_ids` and `cells`
    row_of, positions = rows, computed
    if step.num_decodes < len(rows):
        row_of = np.repeat(rows, counts)
        positions = np.arange(ends[-1]) - np.repeat(ends - counts - computed, counts)
    input_ids = batch.token_ids[row_of, positions].astype(np.int64)
    if len(step.awaits):
        input_ids[step.awaits] = -1 - step.awaited
    cells = batch.block_table[row_of, positions // block_size].astype(np.int64) * block_size
    cells += positions % block_size
    seq_lens = computed + counts
    max_seq_len = int(seq_lens.max())
    columns: list[npt.NDArray[Any]] = [
        input_ids,
        _rope_positions(batch, row_of, positions),
        cells,
        np.concatenate([[0], ends]).astype(np.int32),
        seq_lens.astype(np.int32),
        batch.block_table[rows, : -(-max_seq_len // block_size) + spare_blocks],
    ]
    slots = batch.adapter_slot[rows]
    has_adapters = bool((slots != NO_SLOT).any())
    if has_adapters:
        columns.append(np.repeat(slots, counts))
    if step.attention_ends is not None:
        columns.append(step.attention_ends.astype(np.int32))
    of_tokens, of_positions, cell_mapping, query_start, of_rows, block_table, *others = to_device(columns)
    metadata = AttentionMetadata(
        query_start=query_start,
        seq_lens=of_rows,
        block_table=block_table,
        cell_mapping=cell_mapping,
        query_lens=counts.tolist(),
        host_seq_lens=seq_lens.tolist(),
        num_decodes=step.num_decodes,
        max_seq_len=max_seq_len,
        adapter_slots=others[0] if has_adapters else None,
        attention_ends=None if step.attention_ends is None else others[-1],
    )
    return of_tokens, of_positions, metadata


def _on_host(arrays: Sequence[npt.NDArray[Any]]) -> list[Tensor]:
    return [torch.from_numpy(array) for array in arrays]


class RepeatedInputs:
    """The inputs of a step that the scheduler returns again and again (`RepeatedStep`), advanced where they lie.

    Only for the host as the device, whose tensors share the memory of arrays.
    """

    def __init__(self, step: ScheduledStep, block_size: int) -> None:
        self._step = step
        self._block_size = block_size
        self._latest: tuple[Tensor, Tensor, AttentionMetadata] | None = None
        self._num_quiet = 0
        """Number of the next steps in which no row begins a block."""

    def advance(self, batch: StepRows) -> bool:
        """Go on to the next step; return whether a row begins a block in it, or its inputs lie in new tensors."""
        if self._latest is None:
            return self._lay_out(batch)
        rows, size = self._step.rows, self._block_size
        self._positions += 1
        self._cells += 1
        self._seq_lens += 1
        self._input_ids[:] = batch.token_ids[rows, self._positions]
        if self._num_quiet:
            self._num_quiet -= 1
            return False
        indices, offsets = np.divmod(self._positions, size)
        begun = np.flatnonzero(offsets == 0)
        if len(begun):
            if int(indices.max()) >= self._block_table.shape[1]:
                return self._lay_out(batch)
            blocks = batch.block_table[rows[begun], indices[begun]]
            self._block_table[begun, indices[begun]] = blocks
            self._cells[begun] = blocks.astype(np.int64) * size
        self._num_quiet = size - 1 - int(offsets.max())
        return bool(len(begun))

    def latest(self) -> tuple[Tensor, Tensor, AttentionMetadata]:
        """Return what `step_inputs` returns for the step, valid until `advance`; there may be spare blocks."""
        assert self._latest is not None, "call `advance` first"
        input_ids, positions, metadata = self._latest
        lengths = self._seq_lens.tolist()
        return input_ids, positions, metadata._replace(host_seq_lens=lengths, max_seq_len=max(lengths))

    def _lay_out(self, batch: StepRows) -> bool:
        self._latest = input_ids, positions, metadata = step_inputs(
            self._step, batch, self._block_size, _on_host, _SPARE_BLOCKS
        )
        self._input_ids, self._positions = input_ids.numpy(), positions.numpy()
        self._cells, self._seq_lens = metadata.cell_mapping.numpy(), metadata.seq_lens.numpy()
        self._block_table = metadata.block_table.numpy()
        self._num_quiet = self._block_size - 1 - int((self._positions % self._block_size).max())
        return True


def _rope_positions(batch: StepRows, rows: Rows, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the positions of tokens by their rows and their `indices` [num_tokens] in these."""
    if batch.rope_positions is None:
        return indices
    positions = batch.rope_positions[:, rows, indices].astype(np.int64, order="C")
    return positions if (positions != positions[0]).any() else positions[0]


def token_types(step: ScheduledStep, batch: StepRows, to_device: Callable[[npt.NDArray[Any]], Tensor]) -> Tensor | None:
    """Return the type of each token, int64 [num_tokens], on the device: 1 in the second text of a pair.

    None if all are 0. Each row of the step must hold its whole prompt, as the rows of encoders do.
    """
    first = batch.second_text_at[step.rows]
    if not first.any():
        return None
    counts = step.counts
    first[first == 0] = counts.max()
    positions = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return to_device((positions >= np.repeat(first, counts)).astype(np.int64))
