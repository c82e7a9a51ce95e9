"""A scheduled step token by token, as the model and its attention read it."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
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


ToDevice = Callable[[Sequence[npt.NDArray[Any]]], Sequence[Tensor]]
"""Returns arrays on the device, as `host_copies.all_to_device` does."""


def step_inputs(
    step: ScheduledStep, batch: StepRows, block_size: int, to_device: ToDevice
) -> tuple[Tensor, Tensor, AttentionMetadata]:
    """Return token ids and positions, int64 [num_tokens] each, and what attention reads, on the device.

    The positions are [3, num_tokens] (`Batch.rope_positions`) if a token has several.
    A token that the step awaits (`step.awaits`) has the id -1 - its index in `step.awaited`, for `ops.fill_awaited`.
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
        batch.block_table[rows, : -(-max_seq_len // block_size)],
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
