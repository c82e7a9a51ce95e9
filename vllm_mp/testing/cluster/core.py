"""A simulated core: a scheduler with a token budget, a KV cache and a prefix cache, whose steps take modelled time.

It follows `core/scheduler/scheduler.py`: all running completions decode in each step; the rest of the budget reads
prompts, of which at most one in part; a request is admitted, in order, when the cache has room for all its tokens; when
room runs out, the newest running request is preempted and waits again. Room is counted in tokens. Between two changes
the decodes of many steps are one event, a `segment`, because their time is known in closed form.
"""

import heapq
from collections import deque
from typing import NamedTuple

from vllm_mp.client.cores.router import CHUNK_TOKENS
from vllm_mp.testing.cluster.job import Job
from vllm_mp.testing.cluster.prefix_cache import Holders, PrefixCache
from vllm_mp.testing.cluster.step_times import StepModel

_SPARE_TOKENS = 16
"""Room that an admission leaves for each running request: a block of a core."""


class CoreLimits(NamedTuple):
    """The configuration of a core."""

    cache_tokens: int = 65_536
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 256
    restart_s: float = 5.0
    """Seconds from a death until the next incarnation serves."""


class Segment(NamedTuple):
    """Steps that take place without a change: several steps of decodes, or one step that reads prompts too."""

    start: float
    end: float
    num_steps: int
    chunks: list[tuple[Job, int]]
    """Requests of which the step reads prompt tokens, and how many."""


class StepEnd(NamedTuple):
    """What the end of a segment brought."""

    began: list[Job]
    """Requests that have been read, and got a token."""
    finished: list[Job]


class Wreck(NamedTuple):
    """What a core leaves behind that died."""

    in_step: list[Job]
    """Requests in the step during which it died."""
    others: list[Job]
    unfinished_s: float
    """Seconds of the step that did not end."""


class SimulatedCore:
    """Runs jobs; the caller asks for a segment with `begin` and reports its end with `end_segment`."""

    def __init__(self, number: int, limits: CoreLimits, model: StepModel, holders: Holders) -> None:
        self.number = number
        self.limits = limits
        self.model = model
        self.cache = PrefixCache(number, holders)
        self.waiting: deque[Job] = deque()
        self.partial: Job | None = None
        """The request whose prompt is read in part."""
        self.decodes: dict[Job, None] = {}
        """The running completions, in the order in which they began."""
        self.context = 0
        """Tokens in the cache of all decodes."""
        self.in_use = 0
        """Tokens for which running requests hold room."""
        self.num_unread = 0
        """Prompt tokens that are still to be read, as far as they were not cached when the request came or began."""
        self.num_steps = 0
        """Decode steps so far."""
        self.segment: Segment | None = None
        self.epoch = 0
        """Changes when the end of the segment is no longer what the caller was told."""
        self.num_read = 0
        """Prompt tokens that were read in steps that ended."""
        self.num_reread = 0
        """Tokens read again that another core had computed before it died."""
        self.num_preemptions = 0
        self.num_begun = 0
        """Prompts that were read to their ends, each of which gave a token."""
        self.num_decoded = 0
        """Tokens of decodes."""
        self.busy_s = 0.0
        self._finishes: list[tuple[int, int, Job]] = []
        """(decode steps, number, completion) with which completions end; outdated if the completion was preempted."""

    def jobs(self) -> list[Job]:
        """Return the live requests, the running ones first."""
        return [*self.decodes, *([self.partial] if self.partial else []), *self.waiting]

    def num_left(self, job: Job) -> int:
        """Return the tokens that `job` is still to generate."""
        return job.finish - self.num_steps if job.finish >= 0 else job.request.num_output - job.num_generated

    def next_ends(self) -> list[tuple[int, Job]]:
        """Return the running completions with the decode steps until their ends, the next end first."""
        return sorted(
            ((finish - self.num_steps, job) for finish, _, job in self._finishes if job.finish == finish),
            key=lambda end: end[0],
        )

    def submit(self, job: Job, now: float) -> bool:
        """Take a request; return whether the caller must ask for the end of the segment again."""
        job.core, job.was_read = self.number, False
        hit = self.cache.find(job.request.hashes, (job.num_known - 1) // CHUNK_TOKENS)
        self._count_unread(job, job.num_known - CHUNK_TOKENS * hit)
        self.waiting.append(job)
        if self.segment is None:
            return True
        if self.segment.num_steps == 1 or len(self.waiting) > 1:
            return False
        return self._shorten(self.segment, now)

    def _shorten(self, segment: Segment, now: float) -> bool:
        """End a segment of decodes with the step that runs now, so that the next one can admit a request."""
        rows = len(self.decodes)
        count = self.model.num_steps_in(now - segment.start, rows, self.context) + 1
        if count >= segment.num_steps:
            return False
        end = segment.start + self.model.decode_seconds(count, rows, self.context)
        self.segment = Segment(segment.start, end, count, [])
        self.epoch += 1
        return True

    def begin(self, now: float) -> float | None:
        """Begin the next segment; return when it ends, or None if there is nothing to compute."""
        while self.decodes and self.in_use + len(self.decodes) > self.limits.cache_tokens:
            self._preempt(max(self.decodes, key=lambda job: job.number))
        rows, chunks = len(self.decodes), self._chunks()
        self.epoch += 1
        if chunks:
            read, pairs = 0, 0.0
            for job, count in chunks:
                read += count
                pairs += count * (job.num_computed + (count + 1) / 2)
            seconds, num_steps = self.model.seconds(rows, self.context, read, pairs), 1
        elif rows:
            num_steps = self._next_finish() - self.num_steps
            num_steps = min(num_steps, (self.limits.cache_tokens - self.in_use) // rows)
            seconds = self.model.decode_seconds(num_steps, rows, self.context)
        else:
            self.segment = None
            return None
        self.segment = Segment(now, now + seconds, num_steps, chunks)
        return self.segment.end

    def end_segment(self) -> StepEnd:
        """Process the end of the segment."""
        segment = self.segment
        assert segment is not None
        self.segment = None
        self.busy_s += segment.end - segment.start
        self._decode(segment.num_steps)
        began, finished = [], []
        for job, count in segment.chunks:
            job.num_computed += count
            self.num_read += count
            self._count_unread(job, job.num_counted - count)
            if job.num_computed == job.num_known:
                began.append(job)
                if job is self.partial:
                    self.partial = None
                job.was_read = True
                job.num_generated += 1
                self._start_decode(job)
        while self._finishes and self._finishes[0][0] <= self.num_steps:
            finish, _, job = heapq.heappop(self._finishes)
            if job.finish == finish:
                job.num_generated = job.request.num_output
                self._leave(job)
                finished.append(job)
        self._trim()
        return StepEnd(began, finished)

    def die(self, now: float) -> Wreck:
        """Lose everything but the tokens of the steps that ended; return the requests that must go elsewhere."""
        unfinished_s, in_step = 0.0, []
        if (segment := self.segment) is not None:
            count = 0
            if not segment.chunks:
                count = self.model.num_steps_in(now - segment.start, len(self.decodes), self.context)
                count = min(count, segment.num_steps - 1)
            spent = self.model.decode_seconds(count, len(self.decodes), self.context)
            unfinished_s = now - segment.start - spent
            self.busy_s += spent
            self._decode(count)
            in_step = [*self.decodes, *(job for job, _ in segment.chunks)]
        jobs = self.jobs()
        jobs += [job for job in in_step if job not in self.decodes and job is not self.partial]
        for job in jobs:
            if job.finish >= 0:
                job.num_generated = job.request.num_output - self.num_left(job)
                job.num_computed = job.num_known - 1
            job.num_lost += job.num_computed
            job.num_computed, job.num_private, job.finish, job.moved_s = 0, 0, -1, now
            job.held.clear()
            self._count_unread(job, 0)
        self.cache.clear()
        self.waiting.clear()
        self.decodes.clear()
        self._finishes.clear()
        self.partial, self.segment = None, None
        self.context = self.in_use = 0
        self.epoch += 1
        marked = set(in_step)
        return Wreck(in_step, [job for job in jobs if job not in marked], unfinished_s)

    def _chunks(self) -> list[tuple[Job, int]]:
        """Return what the next step reads of which request, and admit requests for it."""
        chunks: list[tuple[Job, int]] = []
        budget = self.limits.max_num_batched_tokens - len(self.decodes)
        while budget > 0:
            job = self.partial or self._admit(len(self.decodes) + len(chunks))
            if job is None:
                break
            self.partial = None
            count = min(budget, job.num_known - job.num_computed)
            budget -= count
            self._register(job, job.num_computed + count)
            chunks.append((job, count))
            if job.num_computed + count < job.num_known:
                self.partial = job
                break
        return chunks

    def _admit(self, num_running: int) -> Job | None:
        """Give room to the first waiting request and return it; None if there is none, or no room."""
        if not self.waiting or num_running >= self.limits.max_num_seqs:
            return None
        job, cache = self.waiting[0], self.cache
        hashes = job.request.hashes
        num_found = cache.find(hashes, (job.num_known - 1) // CHUNK_TOKENS)
        found = list(hashes[:num_found])
        needed = job.num_known - CHUNK_TOKENS * (num_found - cache.num_idle_among(found))
        spare = _SPARE_TOKENS * num_running  # or one of the next steps would preempt the request admitted now
        if num_running and self.in_use + needed + spare > self.limits.cache_tokens:
            return None
        self.waiting.popleft()
        cache.share(found)
        self.in_use += needed
        job.held = found
        job.num_computed = CHUNK_TOKENS * num_found
        job.num_private = job.num_known - job.num_computed
        if job.hit is None:
            job.hit = job.num_computed
        reread = min(job.num_private, job.num_lost)
        self.num_reread += reread
        job.num_lost = 0
        self._count_unread(job, job.num_private)
        self._trim()
        return job

    def _register(self, job: Job, num_tokens: int) -> None:
        """Let later requests find the blocks that the first `num_tokens` tokens of `job` fill."""
        for block in job.request.hashes[job.num_computed // CHUNK_TOKENS : num_tokens // CHUNK_TOKENS]:
            if self.cache.register(block):
                job.held.append(block)
                job.num_private -= CHUNK_TOKENS

    def _start_decode(self, job: Job) -> None:
        """Let a request decode from the next step on, for which its token takes no room yet."""
        self.decodes[job] = None
        self.context += job.num_known
        job.finish = self.num_steps + job.request.num_output - job.num_generated
        self.num_begun += 1
        heapq.heappush(self._finishes, (job.finish, self.num_begun, job))

    def _next_finish(self) -> int:
        while self._finishes[0][2].finish != self._finishes[0][0]:
            heapq.heappop(self._finishes)
        return self._finishes[0][0]

    def _decode(self, num_steps: int) -> None:
        grown = num_steps * len(self.decodes)
        self.num_steps += num_steps
        self.num_decoded += grown
        self.context += grown
        self.in_use += grown

    def _leave(self, job: Job) -> None:
        """Take a running completion out, and leave its blocks to the prefix cache."""
        job.num_generated = job.request.num_output - (job.finish - self.num_steps)
        job.finish = -1
        del self.decodes[job]
        self.context -= job.num_known
        # The last token is never computed, and those before it since the admission have taken room.
        num_computed = job.num_known - 1
        self.in_use -= num_computed - CHUNK_TOKENS * len(job.held)
        held = list(job.held)
        for block in job.request.hashes[: num_computed // CHUNK_TOKENS][len(held) :]:
            if self.cache.register(block):
                held.append(block)
                self.in_use += CHUNK_TOKENS
        self.in_use -= CHUNK_TOKENS * self.cache.release(held)
        job.held.clear()
        job.num_private = job.num_computed = 0

    def _preempt(self, job: Job) -> None:
        self._leave(job)
        self.num_preemptions += 1
        self._count_unread(job, job.num_known)
        self.waiting.appendleft(job)

    def _trim(self) -> None:
        """Evict idle blocks for which there is no room any more."""
        self.cache.evict(max(0, self.limits.cache_tokens - self.in_use) // CHUNK_TOKENS)

    def _count_unread(self, job: Job, count: int) -> None:
        self.num_unread += count - job.num_counted
        job.num_counted = count
