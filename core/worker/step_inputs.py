"""A scheduled step token by token, as the model and its attention read it."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from vllm_mp.core.lora.cached_adapter import NO_SLOT
from vllm_mp.core.scheduler.batch import Counts
from vllm_mp.core.scheduler.step import ScheduledStep
from vllm_mp.kernels.ops import AttentionMetadata


class StepRows(Protocol):
    """The columns of a batch that a step reads; `core.scheduler.batch.Batch` describes them."""

    token_ids: npt.NDArray[np.int32]
    block_table: npt.NDArray[np.int32]
    num_computed_tokens: Counts
    adapter_slot: npt.NDArray[np.int32]
    second_text_at: npt.NDArray[np.int64]


def step_inputs(
    step: ScheduledStep,
    batch: StepRows,
    block_size: int,
    to_device: Callable[[npt.NDArray[Any]], Tensor],
    latest: Tensor | None = None,
) -> tuple[Tensor, Tensor, AttentionMetadata]:
    """Return token ids and positions, int64 [num_tokens] each, and what attention reads, on the device.

    `latest`, int64 [max_num_seqs] on the device, holds the latest sampled token of each row. Without it, the ids of the
    tokens that the step awaits (`step.awaits`) are arbitrary.
    """
    rows, counts = step.rows, step.counts
    ends = np.cumsum(counts)
    row_of = np.repeat(rows, counts)  # [num_tokens], as are `positions`, `input_ids` and `cells`
    positions = np.arange(ends[-1]) - np.repeat(ends - counts - batch.num_computed_tokens[rows], counts)
    input_ids = to_device(batch.token_ids[row_of, positions].astype(np.int64))
    if latest is not None and len(step.awaits):
        input_ids.index_copy_(0, to_device(step.awaits), latest.index_select(0, to_device(rows[step.awaits])))
    cells = batch.block_table[row_of, positions // block_size].astype(np.int64) * block_size
    cells += positions % block_size
    seq_lens = batch.num_computed_tokens[rows] + counts
    max_seq_len = int(seq_lens.max())
    blocks = batch.block_table[rows, : -(-max_seq_len // block_size)]
    metadata = AttentionMetadata(
        query_start=to_device(np.concatenate([[0], ends]).astype(np.int32)),
        seq_lens=to_device(seq_lens.astype(np.int32)),
        block_table=to_device(blocks),
        cell_mapping=to_device(cells),
        query_lens=counts.tolist(),
        host_seq_lens=seq_lens.tolist(),
        num_decodes=step.num_decodes,
        max_seq_len=max_seq_len,
        adapter_slots=_adapter_slots(batch.adapter_slot[rows], counts, to_device),
    )
    return input_ids, to_device(positions), metadata


def _adapter_slots(
    slots: npt.NDArray[np.int32], counts: npt.NDArray[np.int64], to_device: Callable[[npt.NDArray[Any]], Tensor]
) -> Tensor | None:
    """Return the adapter slot of each token, from the slots of the rows [num_rows]; None if no row has an adapter."""
    return to_device(np.repeat(slots, counts)) if (slots != NO_SLOT).any() else None


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
