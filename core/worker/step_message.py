"""A scheduled step as the core sends it to the other ranks, and the rows of the batch as these keep them.

A message holds what `step_inputs` reads of the batch: for each row the tokens of the step, how many were computed
before, their rotary positions if these are not their indices, the adapter slot, the position of a second text, and the
blocks that the row got since it was last sent. It also says how many tokens are chosen for the row: one, and one more
for each draft; and how far the tokens of images see.
"""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_mp.core.lora.cached_adapter import NO_SLOT
from vllm_mp.core.scheduler.batch import Batch, Rows
from vllm_mp.core.scheduler.step import ScheduledStep
from vllm_mp.core.speculation.drafts import Drafts

Sampling = int
"""What a rank computes of the logits: one of the three constants below."""
NO_LOGITS: Final = 0
ARGMAX: Final = 1
LOGITS: Final = 2
_INT64: Final = np.dtype("<i8")
_INT32: Final = np.dtype("<i4")


class StepMessage(NamedTuple):
    """What a rank learns of a step."""

    step: ScheduledStep
    sampling: Sampling
    """What to compute of the logits of the rows that the step samples."""
    isolates: bool
    """Attention must keep values that are not finite away from other tokens."""
    returns_all: bool
    """In a pipeline: the first stage needs the last hidden states of all tokens, not only of rows that are sampled."""
    embeds: npt.NDArray[np.int64]
    """Indices of the tokens whose embeddings are broadcast."""


class MessageError(ValueError):
    """Raised for a message that no core sends."""


class RowMirror:
    """The columns of a core's batch that `step_inputs` reads, as far as steps have needed them."""

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, has_rope_positions: bool = False
    ) -> None:
        """`block_size` is in tokens."""
        self.rope_positions = np.zeros((3, max_num_seqs, max_model_len), np.int32) if has_rope_positions else None
        # Pages that no request has reached take no memory.
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.block_table = np.zeros((max_num_seqs, -(-max_model_len // block_size)), np.int32)
        self.num_computed_tokens = np.zeros(max_num_seqs, np.int64)
        self.adapter_slot = np.full(max_num_seqs, NO_SLOT, np.int32)
        self.second_text_at = np.zeros(max_num_seqs, np.int64)


class StepEncoder:
    """Writes steps as messages; it knows which blocks of each row the other ranks have."""

    def __init__(self, max_num_seqs: int) -> None:
        self._num_sent = np.zeros(max_num_seqs, np.int64)
        """Number of blocks of each row that were sent."""
        self._tenancy = np.full(max_num_seqs, -1, np.int64)
        """Tenancy of each row for which they were sent (`Batch.tenancy`)."""

    def encode(
        self,
        step: ScheduledStep,
        batch: Batch,
        sampling: Sampling = NO_LOGITS,
        isolates: bool = False,
        embeds: npt.NDArray[np.int64] | None = None,
        returns_all: bool = False,
    ) -> list[bytes]:
        """Return the parts of the message about `step`, whose rows `batch` holds as they are before the step."""
        rows, counts = step.rows, step.counts
        tenancy, last_blocks = batch.tenancy[rows], batch.num_blocks[rows]
        first_blocks = self._num_sent[rows] * (self._tenancy[rows] == tenancy)  # none were sent to a new tenant
        num_blocks = last_blocks - first_blocks
        self._tenancy[rows], self._num_sent[rows] = tenancy, last_blocks
        first_tokens = batch.num_computed_tokens[rows]
        cells = _cells(rows, first_tokens, counts)
        tokens = batch.token_ids[cells]
        blocks = batch.block_table[_cells(rows, first_blocks, num_blocks)]
        indices = np.zeros(0, np.int64) if embeds is None else embeds
        ends = np.zeros(0, np.int64) if step.attention_ends is None else step.attention_ends
        flags = sampling | isolates << 2 | returns_all << 3 | (len(ends) > 0) << 4
        head = [len(rows), len(tokens), len(blocks), len(step.awaits), len(indices), step.num_decodes, flags]
        of_rows = batch.adapter_slot[rows], batch.second_text_at[rows]
        num_choices = step.samples if step.drafts is None else step.samples * (step.drafts.counts + 1)
        columns = (rows, counts, first_tokens, *of_rows, first_blocks, num_blocks, num_choices)
        of_tokens = step.awaits, step.awaited, indices, ends
        wide = np.concatenate((head, *columns, *of_tokens), dtype=_INT64, casting="unsafe")
        parts = [wide.tobytes(), tokens.tobytes(), blocks.tobytes()]
        if batch.rope_positions is not None:
            parts.append(batch.rope_positions[:, *cells].tobytes())
        return parts


def message_bytes(max_num_seqs: int, max_num_batched_tokens: int, max_blocks: int) -> int:
    """Return the most bytes that a step can take, whose rows have up to `max_blocks` blocks."""
    # A token has up to 3 rotary positions beside its id.
    return 8 * (7 + 10 * max_num_seqs + 2 * max_num_batched_tokens) + 4 * (
        4 * max_num_batched_tokens + max_num_seqs * max_blocks
    )


def decode_step(data: memoryview, mirror: RowMirror) -> StepMessage:
    """Return the step of a message, and bring the rows of `mirror` to what they are in the core's batch.

    Raises MessageError if the message is not one that `StepEncoder` makes for such rows.
    """
    try:
        head = np.frombuffer(data, _INT64, 7).tolist()
        num_rows, num_tokens, num_blocks, num_awaits, num_indices, num_decodes, flags = head
        num_ends = num_tokens if flags & 16 else 0
        num_wide = 8 * num_rows + 2 * num_awaits + num_indices + num_ends
        wide = np.frombuffer(data, _INT64, num_wide, 56).copy()  # torch writes
        at = 56 + wide.nbytes
        tokens = np.frombuffer(data, _INT32, num_tokens, at)
        blocks = np.frombuffer(data, _INT32, num_blocks, at + tokens.nbytes)
        columns = wide[: 8 * num_rows].reshape(8, num_rows)
        rows, counts, first_tokens, adapter_slot, second_text_at, first_blocks, block_counts, num_choices = columns
        splits = [num_awaits, 2 * num_awaits, 2 * num_awaits + num_indices]
        awaits, awaited, indices, ends = np.split(wide[8 * num_rows :], splits)
        cells = _cells(rows, first_tokens, counts)
        mirror.token_ids[cells] = tokens
        if mirror.rope_positions is not None:
            rope = np.frombuffer(data, _INT32, 3 * num_tokens, at + tokens.nbytes + blocks.nbytes)
            mirror.rope_positions[:, *cells] = rope.reshape(3, -1)
        mirror.block_table[_cells(rows, first_blocks, block_counts)] = blocks
        mirror.num_computed_tokens[rows] = first_tokens
        mirror.adapter_slot[rows] = adapter_slot
        mirror.second_text_at[rows] = second_text_at
    except (ValueError, IndexError) as error:
        raise MessageError(f"a step of {len(data)} bytes cannot be decoded: {error}") from error
    is_pooled = np.zeros(num_rows, np.bool_)
    drafts = None
    if len(num_choices) and num_choices.max() > 1:
        # The other ranks do not learn which tokens are accepted.
        drafts = Drafts(np.maximum(num_choices - 1, 0), np.zeros(0, np.int64))
    step = ScheduledStep(rows, counts, num_decodes, num_choices > 0, is_pooled, awaits, awaited, drafts=drafts)
    if num_ends:
        step = step._replace(attention_ends=ends)
    return StepMessage(step, flags & 3, bool(flags & 4), bool(flags & 8), indices)


def _cells(rows: Rows, firsts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> tuple[Rows, Rows]:
    """Return the row and the column of the cells of a table from each of `firsts` on, as many as `counts` says.

    Steps of decodes have one token and mostly no new block for each row, which is a short way here.
    """
    ends = counts.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    if not total:
        return rows[:0], rows[:0]
    if total == len(rows) and counts.all():
        return rows, firsts
    return rows.repeat(counts), np.arange(total) - (ends - counts - firsts).repeat(counts)
