"""Which requests run in the next step, and what becomes of them after it.

One token budget covers a whole step; there are no phases. A request in decode wants one token, one in prefill
wants the rest of its prompt and gets a chunk of what the budget has left. When the cache runs out of blocks, the
request that is last in order gives its blocks up and waits again; its tokens are computed anew on its return.

A block can be found by other requests from the moment at which the step that fills it is scheduled. So a request of the
same step may build on blocks that rows before it are about to fill, and requests that begin alike compute their
common beginning once, also when they come together. What makes this right is an invariant of every model: each layer
writes the keys and values of all rows of a step before it attends for any of them.

A step may be scheduled while the one before it is computed. The tokens that this one samples count as there, but what
they are only the device knows: nothing that depends on it is decided before `update` has booked it. A request that such
a token ends is then in the next step already, which makes a token more of it that nobody gets. Where that does not do,
`schedule` gives no step until the one in flight is booked.

Suspects, requests that an earlier core may have died of, go before all others, one at a time and each in steps of its
own until it has got beyond what that core died of. So one that kills the core dies alone, and the status page says
which it was.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_mp.config import SchedulerConfig
from vllm_mp.core.scheduler.batch import NO_ROWS, Batch, Rows, Vector
from vllm_mp.core.scheduler.block_pool import BlockPool, chain_hash
from vllm_mp.core.scheduler.memory_quota import MemoryQuota
from vllm_mp.core.scheduler.request import NO_ROW, Request
from vllm_mp.wire import Finished, TokenLogprobs

_NEVER_REGISTERS = np.iinfo(np.int64).max
"""The count of registered blocks of a request that shares nothing: no number of full blocks is above it."""


class ScheduledStep(NamedTuple):
    """What one step computes; rows that want a single token come first."""

    rows: Rows
    """[num_rows] rows of the batch; a row may read blocks that rows before it fill in this step."""
    counts: npt.NDArray[np.int64]
    """[num_rows] tokens to compute of each."""
    num_decodes: int
    """The first that many rows compute a single token."""
    samples: npt.NDArray[np.bool_]
    """[num_rows] which rows reach their last known token and so get a new one."""
    pools: npt.NDArray[np.bool_]
    """[num_rows] which rows reach their last token and so get their vector."""
    awaits: Rows = NO_ROWS
    """[n] places in `rows`, all among the decodes, of those whose token the step in flight samples."""


class ModelOutput(NamedTuple):
    """What the model made of a step."""

    tokens: npt.NDArray[np.int64]
    """[num_sampled] the new tokens of the rows that the step samples."""
    logprobs: list[tuple[int, TokenLogprobs]]
    """(client, log-probabilities) of new tokens."""
    prompt_logprobs: list[tuple[int, TokenLogprobs]]
    vectors: list[Vector]
    """Of the rows that the step pools, in order."""


class StepUpdate(NamedTuple):
    """The tokens of a step by column [num_sampled], and the requests that it ended."""

    clients: npt.NDArray[np.uint32]
    slots: npt.NDArray[np.uint32]
    tokens: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    finished: list[tuple[int, Finished]]
    """(client, end of the request)."""
    cached: list[tuple[int, int, int]]
    """(client, slot, tokens found in the cache) of requests that have their first token, where there were any."""
    vectors: list[tuple[int, int, Vector]]
    """(client, slot, vector) of requests that end with one."""
    gone: set[tuple[int, int]]
    """(client, slot) of requests that had ended when the step was booked: of these nothing may be sent any more."""


class PendingStep(NamedTuple):
    """A step that is being computed."""

    step: ScheduledStep
    ends: npt.NDArray[np.int64]
    """[num_rows] tokens computed of each row when it is done, and so the place of the token of a row that samples."""
    gone: dict[int, tuple[int, int]]
    """(client, slot) by row of the requests that have left their rows since."""

    @property
    def live(self) -> npt.NDArray[np.bool_]:
        """[num_rows] which rows are still those of the step's requests."""
        if not self.gone:
            return np.ones(len(self.step.rows), np.bool_)
        return ~np.isin(self.step.rows, list(self.gone))


class Scheduler:
    """Owns the waiting requests, the rows of the batch and the blocks of the pool."""

    def __init__(self, config: SchedulerConfig, batch: Batch, pool: BlockPool, block_size: int) -> None:
        self.config = config
        self.batch = batch
        self.pool = pool
        self.block_size = block_size
        self.num_preemptions = 0
        self.memory = MemoryQuota()
        self._requests: dict[tuple[int, int], Request] = {}
        self._waiting: list[tuple[tuple[bool, int, int], Request]] = []
        """A heap; suspects come first."""
        self._num_waiting = 0
        self._held: dict[tuple[int, int], Request] = {}
        """What has arrived during a pause; it is not in line before `resume`."""
        self._arrivals = 0
        self._refused: tuple[tuple[int, int], int] | None = None
        """The order of the request that there was no room for, and the blocks that had been returned by then."""
        self._suspect: Request | None = None
        """The suspect whose turn it is: it has a row, and no other suspect has."""
        self._is_paused = False
        self._is_frozen = False
        self._is_asleep = False
        self._in_flight: deque[PendingStep] = deque()
        """Oldest first: at most one when a step is scheduled."""

    @property
    def num_running(self) -> int:
        return len(self.batch)

    @property
    def num_waiting(self) -> int:
        return self._num_waiting + len(self._held)

    @property
    def num_going_on(self) -> int:
        """Live requests, without those that have arrived during a pause."""
        return len(self._requests) - len(self._held)

    @property
    def has_work(self) -> bool:
        """There is a request that may run now."""
        return not (self._is_frozen or self._is_asleep) and self.num_going_on > 0

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    def is_live(self, client: int, slot: int) -> bool:
        return (client, slot) in self._requests

    def slots_of(self, client: int) -> list[int]:
        """The live slots of `client`."""
        return [slot for owner, slot in self._requests if owner == client]

    def order_of(self, priority: int) -> tuple[int, int]:
        """The place in line of a request that arrives now."""
        self._arrivals += 1
        return (priority if self.config.policy == "priority" else 0, self._arrivals)

    def add(self, request: Request) -> None:
        """Let `request` wait; its (client, slot) must not be live and its tokens must fit the context."""
        self._requests[request.client, request.slot] = request
        self.memory.take(request.client, request.num_bytes)
        if self._is_paused:
            self._held[request.client, request.slot] = request
        else:
            self._wait(request)

    def pause(self, freeze: bool) -> None:
        """Hold back what arrives before `resume`, and with `freeze` also let nothing run that is here already."""
        self._is_paused = True
        self._is_frozen = freeze

    def resume(self) -> None:
        """Undo `pause`."""
        self._is_paused = self._is_frozen = False
        for request in self._held.values():
            self._wait(request)
        self._held.clear()

    def fall_asleep(self) -> None:
        """Let nothing run before `wake_up`, paused or not, and forget that there is anything in any block.

        No step may be in flight. What runs is computed anew afterwards.
        """
        self.preempt_all()
        self.forget_prefixes()
        self._is_asleep = True

    def wake_up(self) -> None:
        """Undo `fall_asleep`."""
        self._is_asleep = False

    def forget_prefixes(self) -> None:
        """Let no block that has been filled be found any more, nor what running requests build on such blocks."""
        self.pool.forget_all()
        self.batch.num_registered[self.batch.order] = _NEVER_REGISTERS

    def preempt_all(self) -> None:
        """Take the blocks of every running request; its tokens are computed anew when it runs again.

        No step may be in flight.
        """
        for row in self.batch.order[::-1].tolist():
            self._preempt(self.batch.request(row))

    def abort_all(self) -> list[tuple[int, Finished]]:
        """End every live request; (client, end) of each."""
        ends = [(client, self.abort(client, slot)) for client, slot in list(self._requests)]
        return [(client, end) for client, end in ends if end is not None]

    def abort(self, client: int, slot: int) -> Finished | None:
        """End a request wherever it is; None if it is not live."""
        request = self._requests.get((client, slot))
        if request is None:
            return None
        if request.row == NO_ROW:
            num_output_tokens = request.num_output_tokens
            self._forget(request)
            if self._held.pop((client, slot), None) is None:
                self._leave_line(request)
        else:
            num_output_tokens = int(self.batch.num_tokens[request.row]) - request.num_prompt_tokens
            num_output_tokens -= int(self.is_awaited()[request.row])
            self._release(request)
        return Finished(slot, num_output_tokens, "abort")

    def schedule(self) -> ScheduledStep | None:
        """Choose the next step's tokens, making room and admitting as the budget allows.

        None if nothing may run, or not before the step in flight is booked, which decides on what there is room for. A
        step must be computed and booked: `launched` when the device has been told what to compute, then `update`.
        """
        if not self.has_work:
            return None
        if self._suspect is not None or (self._waiting and self._waiting[0][1].isolate_until_num_tokens):
            if self._in_flight:
                return None  # it is alone, also in what the device is doing
            step = self._schedule_suspect()
            if step is not None:
                return step
        batch = self.batch
        is_awaited = is_complete = None
        if self._in_flight:
            is_awaited = self.is_awaited()
            if (is_awaited & batch.reads_answer).any():
                return None
            is_complete = is_awaited & (batch.num_tokens >= batch.max_total_tokens)
        if not self._give_blocks_to_growing_rows(is_complete):
            return None
        rows = batch.order
        wanted = batch.num_tokens[rows] - batch.num_computed_tokens[rows]
        decodes, places = rows[wanted == 1], NO_ROWS
        if is_awaited is not None and is_complete is not None:
            decodes = decodes[~is_complete[decodes]]
            places = np.flatnonzero(is_awaited[decodes])
        self._register_full_blocks(decodes, places)
        chunks = self._chunk_prefills(rows[wanted > 1], self.config.max_num_batched_tokens - len(decodes))
        if chunks:
            rows = np.concatenate([decodes, np.array([row for row, _ in chunks], np.int64)])
            counts = np.array([1] * len(decodes) + [count for _, count in chunks], np.int64)
        else:
            rows, counts = decodes, np.ones(len(decodes), np.int64)
        return self._step(rows, counts, len(decodes), places) if len(rows) else None

    def launched(self, step: ScheduledStep) -> None:
        """Note that `step`, the latest of `schedule`, is being computed: its tokens count as there from now on."""
        batch = self.batch
        ends = batch.num_computed_tokens[step.rows] + step.counts
        batch.num_computed_tokens[step.rows] = ends
        batch.num_tokens[step.rows[step.samples]] = ends[step.samples] + 1
        self._in_flight.append(PendingStep(step, ends, {}))

    def is_awaited(self) -> npt.NDArray[np.bool_]:
        """[max_num_seqs] the rows whose last token only the device knows, as a step in flight samples it."""
        return self._mark(lambda flight: flight.step.samples & flight.live)

    def is_in_flight(self) -> npt.NDArray[np.bool_]:
        """[max_num_seqs] the rows of live requests that are in a step in flight."""
        return self._mark(lambda flight: flight.live)

    def _mark(self, which: Callable[[PendingStep], npt.NDArray[np.bool_]]) -> npt.NDArray[np.bool_]:
        """[max_num_seqs] the rows of the steps in flight that `which` chooses of each."""
        marks = np.zeros(len(self.batch.requests), np.bool_)
        for flight in self._in_flight:
            marks[flight.step.rows[which(flight)]] = True
        return marks

    def update(self, step: ScheduledStep, tokens: npt.NDArray[np.int64], vectors: Sequence[Vector] = ()) -> StepUpdate:
        """Book the step that has been in flight for longest: `tokens` [num_sampled] are those of the rows that
        `step.samples` marks, in order.

        `vectors` are those of the rows that `step.pools` marks. A row whose token is negative could not be sampled, one
        whose vector is not finite could not be pooled, and either ends with an error. What is of requests that have
        ended since is dropped.
        """
        batch = self.batch
        flight = self._in_flight.popleft()
        if flight.step is not step:
            raise RuntimeError("steps are booked in the order in which they were launched")
        samples, pools = step.samples, step.pools
        if flight.gone:
            live = flight.live
            tokens = tokens[live[samples]]
            vectors = [vector for vector, is_live in zip(vectors, live[pools].tolist(), strict=True) if is_live]
            samples, pools = samples & live, pools & live
        rows, before = step.rows[samples], flight.ends[samples]
        finished = []
        if len(failed := np.flatnonzero(tokens < 0)):
            finished = self._fail(rows[failed], before[failed])
            rows, before, tokens = (np.delete(column, failed) for column in (rows, before, tokens))
        batch.token_ids[rows, before] = tokens
        suspect = self._suspect
        if suspect is not None and (
            pools.any() or batch.num_tokens[suspect.row] - suspect.num_prompt_tokens >= suspect.isolate_until_num_tokens
        ):
            suspect.isolate_until_num_tokens, self._suspect = 0, None
        slots, clients = batch.slot[rows], batch.client[rows]
        positions = before - batch.num_prompt_tokens[rows]
        cached = []
        for row in rows[positions == 0].tolist():
            request = batch.request(row)
            if request.num_cached_tokens:
                cached.append((request.client, request.slot, request.num_cached_tokens))

        at_eos = batch.stops_at_eos[rows] & (tokens[:, None] == batch.eos_token_ids).any(1)
        stopped_by: dict[int, int] = {}
        for i in np.flatnonzero(batch.has_stop_ids[rows] & ~at_eos).tolist():
            stop_token_ids = batch.request(int(rows[i])).params.stop_token_ids or ()
            if tokens[i] in stop_token_ids:
                stopped_by[i] = int(tokens[i])
        ended = at_eos | (before + 1 >= batch.max_total_tokens[rows])
        ended[list(stopped_by)] = True

        for i in np.flatnonzero(ended).tolist():
            request = batch.request(int(rows[i]))
            reason = "stop" if at_eos[i] or i in stopped_by else "length"
            num_output_tokens = int(before[i]) + 1 - request.num_prompt_tokens
            finished.append((request.client, Finished(request.slot, num_output_tokens, reason, stopped_by.get(i))))
            self._register_blocks(request.row, int(before[i]))  # where its last token was awaited, they may not be yet
            self._release(request)
        pooled = [(batch.request(row), vector) for row, vector in zip(step.rows[pools].tolist(), vectors, strict=True)]
        for request, vector in pooled:
            finished.append((request.client, _end_of_pooling(request, vector)))
            if request.num_cached_tokens:
                cached.append((request.client, request.slot, request.num_cached_tokens))
            self._release(request)
        sent = [(request.client, request.slot, vector) for request, vector in pooled]
        return StepUpdate(clients, slots, tokens, positions, finished, cached, sent, set(flight.gone.values()))

    def _step(
        self, rows: Rows, counts: npt.NDArray[np.int64], num_decodes: int, awaits: Rows = NO_ROWS
    ) -> ScheduledStep:
        batch = self.batch
        ends = batch.num_computed_tokens[rows] + counts == batch.num_tokens[rows]
        is_pooled = batch.is_pooled[rows]
        return ScheduledStep(rows, counts, num_decodes, ends & ~is_pooled, ends & is_pooled, awaits)

    def _schedule_suspect(self) -> ScheduledStep | None:
        """A step of the suspect whose turn it is, for which others give up their places; None if there is none."""
        batch = self.batch
        if self._suspect is not None:
            self._give_blocks_to_growing_rows()  # for which it may lose its own, if it is the last
        if self._suspect is None:
            request = self._first_in_line()
            if request is None or not request.isolate_until_num_tokens:
                return None
            found = self._find_prefix(request)
            while batch.is_full or self._lacks_blocks(request, found):
                self._preempt(batch.request(int(batch.order[-1])))
            self._admit(request, found)
            self._suspect = request
        row = self._suspect.row
        computed, known = int(batch.num_computed_tokens[row]), int(batch.num_tokens[row])
        wanted = known - computed
        if wanted > 1 and known > batch.num_prompt_tokens[row]:
            wanted -= 1  # it was in decode, so its last token is computed in the way that the core died in
        count = min(wanted, self.config.max_num_batched_tokens)
        self._register_blocks(row, computed + count)
        return self._step(np.array([row]), np.array([count]), int(count == 1))

    def _fail(self, rows: Rows, num_tokens: npt.NDArray[np.int64]) -> list[tuple[int, Finished]]:
        """End the requests of `rows` [n] with so many tokens, whose logits allow no other."""
        finished = []
        for row, count in zip(rows.tolist(), num_tokens.tolist(), strict=True):
            request = self.batch.request(row)
            num_output_tokens = count - request.num_prompt_tokens
            error = (
                "the model's logits are not finite, or allowed_token_ids, bad_words, logit_bias and min_tokens "
                "together allow no token; lift one of these, or give the model another prompt"
            )
            finished.append((request.client, Finished(request.slot, num_output_tokens, "error", error=error)))
            self._release(request)
        return finished

    def _chunk_prefills(self, prefilling: Rows, budget: int) -> list[tuple[int, int]]:
        """(row, tokens) for the prompts in progress and, while the budget lasts, for newly admitted ones."""
        config, batch = self.config, self.batch
        chunks: list[tuple[int, int]] = []
        # Where several prompts may be in progress they share the budget, so that a short one behind a long one
        # is not kept waiting.
        shares = 1
        if config.enable_chunked_prefill:
            shares = min(config.max_num_partial_prefills, len(prefilling) + self._num_waiting)
        num_partial = 0

        def chunk(wanted: int) -> int:
            return min(wanted, -(-budget // max(1, shares - num_partial)))

        for row in prefilling.tolist():
            wanted = int(batch.num_tokens[row] - batch.num_computed_tokens[row])
            count = chunk(wanted)
            if count > 0:
                self._register_blocks(row, int(batch.num_computed_tokens[row]) + count)
                chunks.append((row, count))
                budget -= count
            num_partial += count < wanted
        while budget > 0 and num_partial < config.max_num_partial_prefills:
            admissible = self._next_admissible()
            if admissible is None:
                break
            request, found = admissible
            wanted = len(request.tokens) - len(found) * self.block_size
            count = chunk(wanted)
            if count < wanted and not config.enable_chunked_prefill:
                break
            row = self._admit(request, found)
            self._register_blocks(row, int(batch.num_computed_tokens[row]) + count)
            chunks.append((row, count))
            budget -= count
            num_partial += count < wanted
        return chunks

    def _next_admissible(self) -> tuple[Request, list[int]] | None:
        """The first in line and the blocks that hold its first tokens, if there is a row and room for the rest."""
        request = self._first_in_line()
        if request is None or self.batch.is_full:
            return None
        if self._refused == (request.order, self.pool.num_returned):
            return None  # looking its prefix up in every step would make steps as long as prompts
        # A block for each row that grows stays free, or the next few tokens would preempt what is admitted now.
        num_growing = int((~self.batch.is_pooled[self.batch.order]).sum())
        found = self._find_prefix(request)
        if len(self.batch) and self._lacks_blocks(request, found, num_growing):
            self._refused = (request.order, self.pool.num_returned)
            return None
        return request, found

    def _first_in_line(self) -> Request | None:
        while self._waiting and self._waiting[0][1].aborted:
            heapq.heappop(self._waiting)
        return self._waiting[0][1] if self._waiting else None

    def _lacks_blocks(self, request: Request, found: list[int], spare: int = 0) -> bool:
        """There is no room for what `request` needs beside the blocks that were `found`, and `spare` blocks."""
        needed = self._blocks_for(len(request.tokens)) - len(found)
        return needed + spare > self.pool.num_free - self.pool.num_free_among(found)

    def _admit(self, request: Request, found: list[int]) -> int:
        heapq.heappop(self._waiting)
        self._num_waiting -= 1
        self.pool.share(found)
        new = self.pool.allocate(self._blocks_for(len(request.tokens)) - len(found))
        num_computed_tokens = len(found) * self.block_size
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_computed_tokens if len(request.tokens) == request.num_prompt_tokens else 0
        row = self.batch.add(request, np.concatenate([np.array(found, np.int32), new]), num_computed_tokens)
        self.batch.num_registered[row] = len(found) if request.hashes else _NEVER_REGISTERS
        return row

    def _find_prefix(self, request: Request) -> list[int]:
        """The blocks in the cache that hold the beginning of `request`, short of its last token."""
        if not request.hashes or not request.reads_cache:
            return []
        # The last token is always computed: the next one is drawn from what it gives.
        num_full = (len(request.tokens) - 1) // self.block_size
        return self.pool.find(self._block_hashes(request, request.tokens, 0, num_full))

    def _block_hashes(self, request: Request, tokens: npt.NDArray[np.int32], first: int, last: int) -> Iterator[bytes]:
        """The hashes of the blocks [first, last) of `request`, whose tokens begin with `tokens`.

        Those that are not known yet are made as they are asked for, because a long prompt has many and the first is
        often all that is looked up. There must be none missing before `first`.
        """
        hashes = request.hashes
        known = len(hashes) - 1
        yield from hashes[first + 1 : last + 1]
        data = tokens[known * self.block_size : last * self.block_size].tobytes()
        size = self.block_size * tokens.itemsize
        for start in range(0, len(data), size):
            hashes.append(chain_hash(hashes[-1], data[start : start + size]))
            yield hashes[-1]

    def _register_full_blocks(self, decodes: Rows, awaits: Rows) -> None:
        """Register the blocks that one token more fills, of `decodes` [n], those at `awaits` with a token not known."""
        batch = self.batch
        num_tokens = batch.num_computed_tokens[decodes] + 1
        num_tokens[awaits] -= 1
        due = num_tokens // self.block_size > batch.num_registered[decodes]
        for row, count in zip(decodes[due].tolist(), num_tokens[due].tolist(), strict=True):
            self._register_blocks(row, count)

    def _register_blocks(self, row: int, num_tokens: int) -> None:
        """Let the blocks of `row` that its first `num_tokens` tokens fill be found by requests that begin alike.

        The step that is being scheduled computes these tokens, and must not be given up after this.
        """
        batch, num_full = self.batch, num_tokens // self.block_size
        registered = int(batch.num_registered[row])
        if num_full <= registered:
            return
        blocks = batch.block_table[row, registered:num_full].tolist()
        hashes = self._block_hashes(batch.request(row), batch.token_ids[row], registered, num_full)
        for block, digest in zip(blocks, hashes, strict=True):
            self.pool.register(block, digest)
        batch.num_registered[row] = num_full

    def _give_blocks_to_growing_rows(self, is_complete: npt.NDArray[np.bool_] | None = None) -> bool:
        """A block more for every row whose last token has no place yet, preempting from the end of the order.

        The rows that `is_complete` [max_num_seqs] marks need none. False, and nothing is done, where somebody would
        have to be preempted while a step is in flight: that may make room, and what it samples would be lost.
        """
        batch = self.batch
        while True:
            rows = batch.order
            growing = rows[batch.num_tokens[rows] > batch.num_blocks[rows] * self.block_size]
            if is_complete is not None:
                growing = growing[~is_complete[growing]]
            if len(growing) <= self.pool.num_free:
                break
            if self._in_flight:
                return False
            self._preempt(batch.request(int(rows[-1])))
        if len(growing):
            batch.block_table[growing, batch.num_blocks[growing]] = self.pool.allocate(len(growing))
            batch.num_blocks[growing] += 1
        return True

    def _preempt(self, request: Request) -> None:
        if self._in_flight:
            raise RuntimeError("nobody is preempted while a step is in flight: what it samples would be lost")
        self._vacate(request)
        self.num_preemptions += 1
        self._wait(request)

    def _release(self, request: Request) -> None:
        self._vacate(request)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        del self._requests[request.client, request.slot]
        self.memory.give_back(request.client, request.num_bytes)

    def _vacate(self, request: Request) -> None:
        for flight in self._in_flight:
            flight.gone.setdefault(request.row, (request.client, request.slot))
        self.pool.free(self.batch.remove(request.row))
        if request is self._suspect:
            self._suspect = None

    def _wait(self, request: Request) -> None:
        heapq.heappush(self._waiting, ((not request.isolate_until_num_tokens, *request.order), request))
        self._num_waiting += 1

    def _leave_line(self, request: Request) -> None:
        request.aborted = True
        self._num_waiting -= 1
        # The entry stays in the heap until it is reached, unless such entries become the most of it.
        if len(self._waiting) > 2 * self._num_waiting:
            self._waiting = [entry for entry in self._waiting if not entry[1].aborted]
            heapq.heapify(self._waiting)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def _end_of_pooling(request: Request, vector: Vector) -> Finished:
    if np.isfinite(vector).all():
        return Finished(request.slot, 0, "stop")
    return Finished(request.slot, 0, "error", error="the vector is not finite: the model overflows on this prompt")
