"""The life of a step: scheduled, pending, computed, processed.

`Scheduler.schedule` chooses a `ScheduledStep`. From its launch on it is a `PendingStep`, until the scheduler processes
its `ModelOutput`. The `StepUpdate` holds the changes.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from vllm_mp import wire
from vllm_mp.core.scheduler.batch import NEVER_REGISTERS, NO_ROWS, Batch, Counts, Mask, Rows, Vector
from vllm_mp.core.scheduler.request import Request, RequestKey
from vllm_mp.core.speculation.drafts import Drafts, num_accepted, spread

if TYPE_CHECKING:
    from vllm_mp.core.images.request_images import RequestImages


class ScheduledStep(NamedTuple):
    """The rows and tokens of one step. Rows that compute a single token come first.

    The scheduler may return the very step that was processed last once more (`RepeatedStep`): then each of its rows has
    got one token, which is computed now, and nothing else has changed.
    """

    rows: Rows
    """[num_rows] rows of the batch. A row may read blocks that rows before it fill in this step."""
    counts: npt.NDArray[np.int64]
    """[num_rows] number of tokens to compute for each row."""
    num_decodes: int
    """Number of rows, from the first, that compute a single token."""
    samples: Mask
    """[num_rows] True: the row reaches its last known token, so a new token is sampled for it."""
    pools: Mask
    """[num_rows] True: the row of a pooling request reaches its last token, so its vector is made."""
    awaits: Rows = NO_ROWS
    """[n] indexes into `rows` of the decodes whose input token the pending step samples."""
    awaited: Rows = NO_ROWS
    """[n] for each of `awaits`, the index of its token among those that the pending step samples."""
    samples_after_update: bool = False
    """True: how a row is sampled depends on a token that the pending step samples, which must be processed before."""
    num_prompt_tokens: int = 0
    """Tokens of prompts; rows in decode have none."""
    drafts: Drafts | None = None
    """The drafts among the tokens; None if no row has any."""
    attention_ends: Counts | None = None
    """[num_tokens] the number of tokens of its row that each token sees; None: it sees those up to itself.

    Not None only for steps with images whose tokens attend to one another."""
    is_plain: bool = False
    """True: each row computes a single token, and a new token is sampled for it. Such a step has no drafts."""

    @classmethod
    def of(
        cls,
        batch: Batch,
        rows: Rows,
        counts: npt.NDArray[np.int64],
        num_decodes: int,
        awaits: Rows = NO_ROWS,
        awaited: Rows = NO_ROWS,
        drafts: Drafts | None = None,
    ) -> "ScheduledStep":
        """Return the step that computes the next `counts` [num_rows] tokens of `rows` [num_rows] of `batch`."""
        num_known = counts if drafts is None else counts - drafts.counts
        reaches_end = batch.num_computed_tokens[rows] + num_known == batch.num_tokens[rows]
        is_pooled = batch.is_pooled[rows]
        after_update = bool(batch.reads_output[rows[awaits]].any())
        samples, pools = reaches_end & ~is_pooled, reaches_end & is_pooled
        ends = _attention_ends(batch, rows, counts)
        is_plain = num_decodes == len(rows) and drafts is None and ends is None and bool(samples.all())
        return cls(
            rows,
            counts,
            num_decodes,
            samples,
            pools,
            awaits,
            awaited,
            after_update,
            drafts=drafts,
            attention_ends=ends,
            is_plain=is_plain,
        )

    @property
    def num_choices(self) -> Counts:
        """Number of tokens [num_sampled] that are chosen for each row that is sampled: one, and one for each draft."""
        if self.drafts is None:
            return np.ones(int(np.count_nonzero(self.samples)), np.int64)
        return self.drafts.counts[self.samples] + 1

    def choices(self, num_computed: Counts) -> tuple[Rows, Counts]:
        """Return the row [num_chosen] of each token that is chosen, and the number of tokens [num_chosen] before it.

        `num_computed` [num_rows] counts the tokens of each row that were computed before the step.
        """
        rows, num_tokens = self.rows[self.samples], (num_computed + self.counts)[self.samples]
        if self.drafts is None:
            return rows, num_tokens
        lengths = self.num_choices
        return rows.repeat(lengths), (num_tokens - lengths + 1).repeat(lengths) + spread(lengths)

    def chosen_indices(self) -> Rows:
        """Return the index, among the tokens of the step, of the token after which each token is chosen."""
        last = (np.cumsum(self.counts) - 1)[self.samples]
        if self.drafts is None:
            return last
        lengths = self.num_choices
        return (last - lengths + 1).repeat(lengths) + spread(lengths)

    def num_accepted(self, tokens: npt.NDArray[np.int64]) -> Counts:
        """Return how many of its drafts each row that is sampled accepts [num_sampled].

        `tokens` [num_chosen] are those of the model output.
        """
        assert self.drafts is not None
        return num_accepted(self.drafts.counts[self.samples], self.drafts.tokens, tokens)

    def is_yielded(self, tokens: npt.NDArray[np.int64]) -> Mask:
        """Return a mask [num_chosen]: True if the step yields the token, of those that the model output has."""
        is_yielded: Mask = spread(self.num_choices) <= self.num_accepted(tokens).repeat(self.num_choices)
        return is_yielded

    def of_rows(self, is_kept: Mask) -> "ScheduledStep":
        """Return the computed step with the rows that `is_kept` [num_rows] marks, without awaited tokens."""
        return self._replace(
            rows=self.rows[is_kept],
            counts=self.counts[is_kept],
            num_decodes=int(is_kept[: self.num_decodes].sum()),
            samples=self.samples[is_kept],
            pools=self.pools[is_kept],
            drafts=None if self.drafts is None else self.drafts.of_rows(is_kept),
            attention_ends=None,
        )


def _attention_ends(batch: Batch, rows: Rows, counts: npt.NDArray[np.int64]) -> Counts | None:
    """Return `ScheduledStep.attention_ends` of a step of the next `counts` [num_rows] tokens of `rows` [num_rows]."""
    if not batch.has_whole_images[rows].any():
        return None
    firsts, starts = batch.num_computed_tokens[rows], np.cumsum(counts) - counts
    ends = None
    for i in np.flatnonzero(batch.has_whole_images[rows] & (firsts < batch.num_prompt_tokens[rows])).tolist():
        first, images = int(firsts[i]), batch.request(int(rows[i])).images
        assert images is not None
        for part in images.parts(first, first + int(counts[i])):
            if ends is None:
                ends = 1 + np.arange(int(counts.sum())) - np.repeat(starts - firsts, counts)
            at = int(starts[i]) + part.position - first
            ends[at : at + part.num_tokens] = part.position + part.num_tokens
    return ends


class Prefills:
    """The chunks of prompts in a step that is being scheduled, and the tokens that are left for more of them."""

    def __init__(self, budget: int, shares: int) -> None:
        """`budget` is in tokens; up to `shares` prompts in progress divide it among them."""
        self.budget = budget
        self.rows: list[int] = []
        self.counts: list[int] = []
        """Number of tokens to compute for each of `rows`."""
        self.num_partial = 0
        """Number of prompts that get less than they want."""
        self.num_prompt_tokens = 0
        """Tokens that were added since `begin_prompts`."""
        self._shares = shares

    def begin_prompts(self, limit: int) -> None:
        """Leave at most `limit` tokens for what is added from now on, the chunks of prompts."""
        self.budget = min(self.budget, limit)
        self.num_prompt_tokens = 0

    def chunk(self, wanted: int) -> int:
        """Return the number of tokens that a prompt gets if it wants `wanted`; may be 0."""
        return min(wanted, -(-max(0, self.budget) // max(1, self._shares - self.num_partial)))

    def whole(self, images: "RequestImages", first: int, count: int) -> int:
        """Return the number of tokens that a prompt gets from `first` on instead of `count`, so as to divide no image.

        The images are those that no step may divide. An image at `first` that exceeds the budget is computed
        nevertheless if no other prompt has tokens in the step, so that it is computed in the end.
        """
        divided = images.divided_by(first + count) if count else None
        if divided is None:
            return count
        begin, end = divided
        if begin > first:
            return begin - first
        return end - first if end - first <= self.budget or not self.num_prompt_tokens else 0

    def add(self, row: int, count: int, wanted: int) -> None:
        """Give `row` a chunk of `count` tokens, where it wants `wanted`."""
        if count > 0:
            self.rows.append(row)
            self.counts.append(count)
            self.budget -= count
            self.num_prompt_tokens += count
        self.num_partial += count < wanted


class ModelOutput(NamedTuple):
    """The results of a step: tokens, log-probabilities, vectors."""

    tokens: npt.NDArray[np.int64]
    """[num_chosen] new tokens of the rows that the step samples, in order: one for each, and one after each draft.

    Negative: no token could be sampled."""
    logprobs: Sequence[tuple[int, wire.TokenLogprobs]] = ()
    """(client, log-probabilities) of new tokens."""
    prompt_logprobs: Sequence[tuple[int, wire.TokenLogprobs]] = ()
    """(client, log-probabilities) of prompt tokens."""
    vectors: Sequence[Vector] = ()
    """[num_pooled] vectors of the rows that the step pools, in order."""


class StepUpdate(NamedTuple):
    """The changes by a model output: new tokens by column, and the requests that ended."""

    clients: npt.NDArray[np.uint32]
    """[num_tokens] client of each new token's request."""
    slots: npt.NDArray[np.uint32]
    """[num_tokens] slot of each new token's request."""
    tokens: npt.NDArray[np.int64]
    """[num_tokens] new tokens."""
    positions: npt.NDArray[np.int64]
    """[num_tokens] position of each new token in the output of its request, from 0."""
    finished: list[tuple[int, wire.Finished]]
    """(client, end) of each request that the step ended."""
    cached: list[tuple[int, int, int]]
    """(client, slot, number of cached tokens) of each request that got its first token or its vector, if the number
    is above 0."""
    vectors: list[tuple[int, int, Vector]]
    """(client, slot, vector) of each pooling request that the step ended."""
    gone: set[RequestKey]
    """Requests that ended while the step was pending. Nothing may be sent about them any more."""
    queued: Sequence[tuple[int, int, float]] = ()
    """(client, slot, seconds in the waiting queue) of each request that got its first token or its vector."""
    adapters: Sequence[tuple[int, int, str]] = ()
    """(client, slot, digest of its adapter's weights) of each request with an adapter that got its first token."""
    only_client: tuple[int, bytes] | None = None
    """What `pack_only_client` returns for the tokens, if it is known; None may also mean that it is not."""


def pack_only_client(clients: npt.NDArray[np.uint32], slots: npt.NDArray[np.uint32]) -> tuple[int, bytes] | None:
    """Return the client and the packed `slots` [n] if all `clients` [n] are the same one; else None."""
    client = int(clients[0])
    return (client, wire.pack_slots(slots)) if (clients == client).all() else None


class RepeatedStep:
    """A step of decodes that is scheduled again after it was processed, with what stays the same meanwhile.

    A batch repeats its step as long as every row gets one token, and no request joins, leaves or ends. So most steps of
    a batch need nearly nothing computed again.
    """

    def __init__(self, step: ScheduledStep, batch: Batch) -> None:
        """`step` has just been processed without an end, and `can_repeat` allows it."""
        rows = step.rows
        self.step = step
        self.num_changes = batch.num_changes
        """That of the batch; when it has another, the step is not repeated."""
        self.clients: npt.NDArray[np.uint32] = batch.client[rows]
        """[num_rows] the column of `batch` with that name, as the next two."""
        self.slots: npt.NDArray[np.uint32] = batch.slot[rows]
        self.only_client = pack_only_client(self.clients, self.slots)
        self.num_prompt_tokens: Counts = batch.num_prompt_tokens[rows]
        self.num_quiet = 0
        """Number of the next steps in which no row begins or fills a block."""
        self.is_quiet = False
        """No row begins or fills a block in the step that was scheduled last."""
        self.blocks: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        """[num_rows] the block of the last computed token of each row."""
        self.offsets: Counts = np.zeros(0, np.int64)
        """[num_rows] the offset of that token in its block."""
        self.is_sealed = bool(
            (batch.num_registered[rows] != NEVER_REGISTERS).all() and not batch.has_embeds[rows].any()
        )
        """The tokens of all rows are noted in the seal table, one by one."""
        self._batch = batch
        self._num_left = int((batch.max_total_tokens[rows] - batch.num_tokens[rows]).min()) - 1
        """Number of the next steps with which no request reaches its length."""
        self._stop_tokens = _stop_tokens(batch, rows)

    @staticmethod
    def can_repeat(step: ScheduledStep, batch: Batch) -> bool:
        """Return whether `step`, which was processed and has ended no request, has all rows, one token in each."""
        return step.is_plain and len(step.rows) == len(batch) and not batch.is_constrained[step.rows].any()

    def num_output_tokens(self) -> Counts:
        """Return the number of output tokens [num_rows] of each row."""
        num_tokens: Counts = self._batch.num_tokens[self.step.rows]
        return num_tokens - self.num_prompt_tokens

    def take(self, output: "ModelOutput") -> bool:
        """Count the tokens of the step; return False, and count none, if one of them may end its request."""
        tokens = output.tokens.tolist()
        if self._num_left <= 0 or min(tokens) < 0 or not self._stop_tokens.isdisjoint(tokens):
            return False
        self._num_left -= 1
        return True


def _stop_tokens(batch: Batch, rows: Rows) -> set[int]:
    """Return the tokens each of which ends a request in at least one of `rows` [n]."""
    stops = set(batch.eos_token_ids.tolist()) if batch.stops_at_eos[rows].any() else set()
    for row in rows[batch.has_stop_ids[rows]].tolist():
        stops.update(batch.request(row).sampling.stop_token_ids or ())
    return stops


class OutputHandle(Protocol):
    """Stands for the output of a launched step, which the device may still be computing."""

    def sample(self) -> None:
        """Sample the step's tokens on the device; called once, before `wait`."""
        ...

    def wait(self) -> ModelOutput:
        """Return the output; block until the device has computed it."""
        ...


class LiveOutput(NamedTuple):
    """The part of a model output that belongs to requests that are still live."""

    rows: Rows
    """[num_sampled] rows with a new token."""
    ends: npt.NDArray[np.int64]
    """[num_sampled] number of computed tokens of each row, which is the index of the new token in the row."""
    tokens: npt.NDArray[np.int64]
    """[num_sampled] new tokens. Negative: no token could be sampled."""
    pooled_rows: Rows
    """[num_pooled] rows with a vector."""
    vectors: Sequence[Vector]
    """[num_pooled] vectors."""


class PendingStep(NamedTuple):
    """A step that was launched and whose output has not been processed."""

    number: int
    """Number of the step, counted from 1 in each core."""
    step: ScheduledStep
    output: OutputHandle
    ends: npt.NDArray[np.int64]
    """[num_rows] number of computed tokens of each row after this step, without drafts."""
    gone: dict[int, RequestKey]
    """By row, the request that left the row after the launch."""
    forced: dict[int, list[int]]
    """By row, the tokens that follow the sampled token and are known, as it is, because a grammar forces them."""
    scheduled_at: float = 0.0
    """By the clock of the scheduler's `PrefillPace`."""

    @property
    def live(self) -> Mask:
        """Return a mask [num_rows]: True if the request for which the row was launched still has the row."""
        if not self.gone:
            return np.ones(len(self.step.rows), np.bool_)
        return ~np.isin(self.step.rows, list(self.gone))

    def live_output(self, output: ModelOutput) -> LiveOutput:
        """Return `output` without the tokens and vectors of requests that ended while the step was pending."""
        step, tokens, vectors = self.step, output.tokens, output.vectors
        if step.is_plain and not self.gone:
            return LiveOutput(step.rows, self.ends, tokens, NO_ROWS, ())
        samples, pools = step.samples, step.pools
        if self.gone:
            live = self.live
            tokens = tokens[live[samples]]
            vectors = [vector for vector, is_live in zip(vectors, live[pools].tolist(), strict=True) if is_live]
            samples, pools = samples & live, pools & live
        return LiveOutput(step.rows[samples], self.ends[samples], tokens, step.rows[pools], vectors)


class PendingSteps:
    """The queue of all pending steps, oldest first.

    While the next step is scheduled there is at most one, in a pipeline one fewer than there are stages.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._steps: deque[PendingStep] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[PendingStep]:
        return iter(self._steps)

    @property
    def oldest(self) -> PendingStep:
        return self._steps[0]

    def append(self, pending: PendingStep) -> None:
        self._steps.append(pending)

    def pop_oldest(self) -> PendingStep:
        return self._steps.popleft()

    def leave(self, request: Request) -> None:
        """Note that `request` leaves its row, so that its output in pending steps is discarded."""
        for pending in self._steps:
            pending.gone.setdefault(request.row, request.key)

    def live_rows(self) -> Mask:
        """Return a mask [max_num_seqs]: True if the row's request is in a pending step."""
        mask = np.zeros(self._max_num_seqs, np.bool_)
        for pending in self._steps:
            mask[pending.step.rows[pending.live]] = True
        return mask

    def indices_of_tokens(self, rows: Rows) -> Rows:
        """Return for each of `rows` [n] the index of its token among those that the latest pending step samples."""
        step = self._steps[-1].step
        sampled = step.rows[step.samples]
        indices = np.zeros(self._max_num_seqs, np.int64)
        indices[sampled] = np.arange(len(sampled))
        found: Rows = indices[rows]
        return found

    def awaited_rows(self) -> Mask:
        """Return a mask [max_num_seqs]: True if a pending step samples the row's last token, which the host lacks."""
        mask = np.zeros(self._max_num_seqs, np.bool_)
        for pending in self._steps:
            mask[pending.step.rows[pending.step.samples & pending.live]] = True
            mask[list(pending.forced)] = False
        return mask
