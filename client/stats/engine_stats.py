"""The statistics of a client and its core: counters, histograms, and the records of finished requests.

The work is per message, or per request, never per token. Moments are in seconds of `time.monotonic()`.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_mp import wire
from vllm_mp.client.outputs.pooling_stream import PoolingStream
from vllm_mp.client.outputs.stream import RequestStream
from vllm_mp.client.stats.engine_counters import EngineCounters
from vllm_mp.client.stats.finished_request import FinishedRequest
from vllm_mp.client.stats.iteration_stats import FinishedRequestStats, FinishReason, IterationStats
from vllm_mp.client.stats.live_request import LiveRequest, finish_reason
from vllm_mp.requests.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_MAX_RESTARTS = 20
"""Restarts that are remembered with their causes."""
_REPORT_S = 10.0
_SETTLE_S = 0.1
"""Time for which steps may wait to be counted: many together cost less."""


@dataclass(slots=True)
class Restart:
    """A death of the core, and what became of it."""

    time: float
    """When the core died, in seconds of `time.time()`."""
    kind: str
    """One of `DEATH_KINDS`."""
    cause: str
    recovery_s: float | None = None
    """Seconds until the next core served; None while there is no core."""
    num_recovered: int | None = None
    """Requests that continue on the next core, or on others; None while it is unknown."""
    died_at: float = 0.0
    """`time` in seconds of `time.monotonic()`."""


class _LatestStep:
    """The latest step with tokens of one core, whose successors usually have the same slots."""

    __slots__ = ("indexes", "settle_at", "slots", "time", "usual")

    def __init__(self) -> None:
        self.slots = b""
        """The slots of the step, as in its message; none after a slot changed hands."""
        self.indexes: npt.NDArray[np.integer[Any]] = np.zeros(0, np.uint16)
        """[num_tokens] the same as numbers."""
        self.time = -1.0
        """When the step arrived that is counted."""
        self.usual: deque[float] = deque()
        """When further steps with the same slots arrived, which are not counted yet. Added to without the lock."""
        self.settle_at = 0.0
        """When these are due to be counted."""


class EngineStats(EngineCounters):
    """Counts what a client sends and receives; the parts of the client call it, readers read its metrics.

    The metrics, and what is recorded, may be read from any thread. A front process also counts its HTTP requests in
    `cells`.
    """

    def __init__(self, max_model_len: int, has_prefix_cache: bool = True) -> None:
        """`max_model_len` is in tokens."""
        super().__init__(max_model_len)
        self._has_prefix_cache = has_prefix_cache
        self._live: dict[RequestStream, LiveRequest] = {}
        self._awaited: dict[int, tuple[RequestStream, bool]] = {}
        """By slot: the stream of a completion or vector that no step has begun, and whether it is its first."""
        self._last_token = np.zeros(wire.MAX_LIVE_REQUESTS)
        """[slot] when the latest token arrived; 0 before the first. The slots of each core's latest step excepted.
        Entries of slots that were never in use take no memory."""
        self._steps: dict[int, _LatestStep] = {0: _LatestStep()}
        """By the rank of the core."""
        self.restarts: deque[Restart] = deque(maxlen=_MAX_RESTARTS)
        """The latest deaths of this client's cores, the oldest first."""
        self._recovers_since: float | None = None
        """The moment of the death after which no token of `_recovering` has arrived; None otherwise."""
        self._recovering: dict[int, RequestStream] = {}
        """By slot: the live streams that cores were told after a death, until the first token of any of them."""
        self._listeners: list[Callable[[FinishedRequest], None]] = []
        self._reports: list[Callable[[], object]] = []
        self._reported_at = time.monotonic()
        self._lock = threading.RLock()
        """Held while steps and requests are counted, and while what waits to be counted is read."""
        self._record: IterationStats | None = None
        """What has happened since `take_record`; None if it is not recorded."""
        self._on_news: Callable[[], None] | None = None
        self._announces = False
        """`_on_news` must be called when something is recorded."""

    def add_listener(self, listener: Callable[[FinishedRequest], None]) -> None:
        """Call `listener` with each request that ends. A listener that raises is reported, and not called again."""
        self._listeners.append(listener)

    def add_report(self, report: Callable[[], object]) -> None:
        """Call `report` every 10 seconds, or when the next tokens arrive after that time."""
        self._reports.append(report)

    def begin_records(self, on_news: Callable[[], None]) -> None:
        """Record what happens, for `take_record`; `on_news` is called when the first of it happens after each."""
        with self._lock:
            self.settle()
            self._record = self._record or IterationStats()
            self._on_news, self._announces = on_news, True

    def end_records(self) -> None:
        """Record nothing any more."""
        with self._lock:
            self._record, self._announces = None, False

    def take_record(self) -> IterationStats | None:
        """Return what was recorded since the last call; None if nothing has happened."""
        with self._lock:
            self._announces = self._record is not None  # before the steps are counted, so that none is left unannounced
            self.settle()
            record = self._record
            if record is None or record.is_empty:
                return None
            self._record = IterationStats()
            record.iteration_timestamp = time.time()
            return record

    def live_adapters(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the number of live requests by adapter: of those without a first output, and of the others."""
        waiting: Counter[str] = Counter()
        running: Counter[str] = Counter()
        with self._lock:
            for live in self._live.values():
                if live.adapter is not None:
                    (waiting if live.first_token is None else running)[live.adapter] += 1
        return dict(waiting), dict(running)

    def share(self, folder: Path, name: str) -> None:
        """Count together with other processes, from now on in files called `name` in `folder`.

        `folder` is private to one server. A process that takes the name of a process that has died counts on. Raises
        OSError if a file cannot be made.
        """
        self.cells.share(folder, name)
        self.core_restarts.share(folder, name)

    def note_sent(
        self,
        stream: RequestStream,
        arrival_time: float,
        trace_headers: Mapping[str, str],
        adapter: str | None = None,
    ) -> None:
        """Count a request that was given to the core; `arrival_time` is in seconds of `time.time()`.

        `adapter` is the name of its LoRA adapter.
        """
        now = time.monotonic()
        arrival = now - max(0.0, time.time() - arrival_time)
        with self._lock:
            self._live[stream] = LiveRequest(arrival, now, trace_headers, adapter)
            self._write_steps()
            for awaited in stream.awaited:
                self._last_token[awaited.slot] = 0.0
                self._awaited[awaited.slot] = (stream, awaited.index == 0)
            if isinstance(stream.params, SamplingParams):
                self.params_n.observe(stream.params.n)
                if stream.params.max_tokens is not None:
                    self.params_max_tokens.observe(stream.params.max_tokens)

    def note_unsent(self) -> None:
        """Count a request that was aborted before it was given to the core."""
        with self._lock:
            self.finished_requests.add(1, "abort")
            if self._record is not None:
                self._record.finished_requests.append(FinishedRequestStats(FinishReason.ABORT))
                self._announce()

    def note_step(self, message: wire.StepOutput, rank: int = 0) -> None:
        """Count the tokens of a message of the core with this rank, before it is given to the streams."""
        step = self._steps.get(rank)
        if step is None:
            step = self._steps[rank] = _LatestStep()
        if message.slots == step.slots and step.slots and not message.queued:
            # The usual step: each request had its latest token in the step before. Counting it waits.
            now = time.monotonic()
            step.usual.append(now)
            if now >= step.settle_at:
                self._settle(step)
        elif message.tokens or message.queued:
            with self._lock:
                self._note_other_step(step, message, time.monotonic())
        if self._announces:
            self._announce()

    def _note_other_step(self, step: _LatestStep, message: wire.StepOutput, now: float) -> None:
        """Count a step whose requests differ from the requests of the core's step before."""
        num_tokens, num_prompt_tokens = len(message.tokens) // 4, 0
        if message.queued:
            num_prompt_tokens = self._note_first(message, now)
        if num_tokens:
            self.generation_tokens.add(num_tokens)
            if self._record is not None:
                self._record.num_generation_tokens += num_tokens
            self._note_other_slots(step, message.slots, num_tokens, now)
            step.time = now
            if (
                self._recovers_since is not None
                and step.slots  # else the message was wrong, and the indexes are those of an earlier one
                and not self._recovering.keys().isdisjoint(step.indexes.tolist())
            ):
                self.recovery_s.observe(now - self._recovers_since)
                self._recovers_since = None
                self._recovering.clear()
        self.step_tokens.observe(num_prompt_tokens + num_tokens)
        self._report(now)

    def settle(self) -> None:
        """Count the steps that wait to be counted."""
        for step in list(self._steps.values()):
            self._settle(step)

    def _settle(self, step: _LatestStep) -> None:
        """Count the steps of a core that wait to be counted."""
        if not step.usual:
            return
        with self._lock:
            usual = [step.usual.popleft() for _ in range(len(step.usual))]
            num_tokens, previous, record = len(step.indexes), step.time, self._record
            for moment in usual:
                self.between_tokens_s.observe(moment - previous, num_tokens)
                if record is not None:
                    record.intervals.append((moment - previous, num_tokens))
                previous = moment
            step.time = previous
            step.settle_at = previous + _SETTLE_S
            self.generation_tokens.add(num_tokens * len(usual))
            self.step_tokens.observe(num_tokens, len(usual))
            if record is not None:
                record.num_generation_tokens += num_tokens * len(usual)
            self._report(previous)

    def note_end(self, stream: RequestStream) -> None:
        """Count the end of a request, and hand its record to the listeners."""
        with self._lock:
            live = self._live.pop(stream, None)
            if live is None:
                return  # it was never given to the core
            self.settle()
            for awaited in stream.awaited:
                entry = self._awaited.get(awaited.slot)
                if entry is not None and entry[0] is stream:
                    del self._awaited[awaited.slot]
                if self._recovering.get(awaited.slot) is stream:
                    del self._recovering[awaited.slot]
            if not self._recovering:
                self._recovers_since = None
            now = time.monotonic()
            reason = finish_reason(stream)
            lengths = [awaited.num_tokens for awaited in stream.awaited]
            self.finished_requests.add(1, reason)
            if reason == "length" or reason == "stop":
                self._count_finished(stream, live, lengths, now)
            if self._record is not None:
                self._record.add_finished(live.stats(stream, lengths, reason, now), lengths)
                self._announce()
        if self._listeners:
            self._hand_over(live.record(stream, sum(lengths), reason, now))

    def note_death(self, kind: str, at: float, cause: str) -> Restart:
        """Note that a core died `at` a moment; `kind` is one of `DEATH_KINDS`, `cause` says more.

        Return the record for `note_recovered` and `note_restart`.
        """
        restart = Restart(at + time.time() - time.monotonic(), kind, cause, died_at=at)
        self.restarts.append(restart)
        return restart

    def note_recovered(self, restart: Restart, streams: Iterable[RequestStream]) -> None:
        """Count `streams` that other cores were told after a death; those sent after it do not count."""
        with self._lock:
            self._count_recovered(restart, streams)

    def note_restart(self, restart: Restart, streams: Iterable[RequestStream]) -> None:
        """Count a restart: the next core serves, and is told `streams`, the live requests that it must go on with."""
        with self._lock:
            self._write_steps()  # so that the next step is not a usual one
            restart.recovery_s = time.monotonic() - restart.died_at
            self.core_restarts.add(restart.kind)
            self._count_recovered(restart, streams)

    def _count_recovered(self, restart: Restart, streams: Iterable[RequestStream]) -> None:
        num_recovered = 0
        for stream in streams:
            live = self._live.get(stream)
            if live is None or live.sent >= restart.died_at:
                continue
            num_recovered += 1
            live.num_recoveries += 1
            self._recovers_since = restart.died_at
            self._recovering.update({awaited.slot: stream for awaited in stream.awaited if awaited.finish is None})
        restart.num_recovered = (restart.num_recovered or 0) + num_recovered
        self.recovered_requests.add(num_recovered)

    def _note_first(self, message: wire.StepOutput, now: float) -> int:
        """Count requests whose first token or vector is in `message`; return the number of their prompts' tokens."""
        cached, record = dict(message.cached), self._record
        num_prompt_tokens = 0
        for slot, queue_s in message.queued:
            entry = self._awaited.pop(slot, None)
            if entry is None:
                continue  # the request has ended for its consumer
            stream, is_first = entry
            live = self._live[stream]
            if live.first_token is None:
                # What a core says is kept within what is possible.
                live.first_token, live.queue_s = now, min(max(0.0, queue_s), now - live.sent)
                if not isinstance(stream, PoolingStream):
                    self.first_token_s.observe(now - live.arrival)
                    if record is not None:
                        record.time_to_first_tokens_iter.append(now - live.arrival)
            if is_first:
                live.num_cached_tokens = min(max(0, cached.get(slot, 0)), stream.num_prompt_tokens)
                num_prompt_tokens += stream.num_prompt_tokens
                self.prefix_cache_hits.add(live.num_cached_tokens)
                if record is not None:
                    record.add_prompt(stream.num_prompt_tokens, live.num_cached_tokens, self._has_prefix_cache)
        self.prompt_tokens.add(num_prompt_tokens)
        if self._has_prefix_cache:
            self.prefix_cache_queries.add(num_prompt_tokens)
        return num_prompt_tokens

    def _announce(self) -> None:
        """Call `_on_news`, unless it has been called since the last `take_record`."""
        if self._announces and self._on_news is not None:
            self._announces = False
            self._on_news()

    def _report(self, now: float) -> None:
        if now - self._reported_at >= _REPORT_S:
            self._reported_at = now
            for report in self._reports:
                report()

    def _note_other_slots(self, step: _LatestStep, slots: bytes, num_tokens: int, now: float) -> None:
        """Count the tokens of a step whose slots differ from the slots of the step before."""
        self._write_step(step)
        dtype = wire.slot_dtype(slots, num_tokens)
        if dtype is None:
            return  # the streams refuse the message
        if num_tokens == 1:
            self._note_only_slot(step, slots, now)
            return
        indexes: npt.NDArray[np.integer[Any]] = np.frombuffer(slots, dtype)
        if dtype == "<u4":
            indexes = indexes[indexes < wire.MAX_LIVE_REQUESTS]  # a core may name slots that cannot exist
        last = self._last_token.take(indexes)
        usual = last == step.time
        num_usual = int(np.count_nonzero(usual))
        record = self._record
        if num_usual:
            self.between_tokens_s.observe(now - step.time, num_usual)
            if record is not None:
                record.intervals.append((now - step.time, num_usual))
        if num_usual < len(last):
            others = [now - moment for moment in last[~usual].tolist() if moment]
            self.between_tokens_s.observe_all(others)
            if record is not None:
                record.intervals += [(interval, 1) for interval in others]
        self._last_token[indexes] = now
        if len(indexes) == num_tokens:
            step.slots, step.indexes = slots, indexes

    def _note_only_slot(self, step: _LatestStep, slots: bytes, now: float) -> None:
        """Count the token of a step of a single request, for which arrays would cost more than all else."""
        slot = int.from_bytes(slots, "little")
        if slot >= wire.MAX_LIVE_REQUESTS:
            return  # a core may name slots that cannot exist
        last = self._last_token.item(slot)
        if last:
            self.between_tokens_s.observe(now - last)
            if self._record is not None:
                self._record.intervals.append((now - last, 1))
        self._last_token[slot] = now
        step.slots, step.indexes = slots, np.array([slot])

    def _write_steps(self) -> None:
        for step in self._steps.values():
            self._write_step(step)

    def _write_step(self, step: _LatestStep) -> None:
        """Write the moment of the latest step to its slots, which from now on are not known to be the next step's."""
        self._settle(step)
        if step.slots:
            self._last_token[step.indexes] = step.time
            step.slots = b""

    def _count_finished(self, stream: RequestStream, live: LiveRequest, lengths: list[int], now: float) -> None:
        """Count a request that ended `now` with "stop" or "length"; `lengths` are the tokens of its completions."""
        self.e2e_s.observe(now - live.arrival)
        self.tokenize_s.observe(live.sent - live.arrival)
        self.request_prompt_tokens.observe(stream.num_prompt_tokens)
        first, queue_s = live.first_token, live.queue_s
        if first is None or queue_s is None:
            return
        scheduled = live.sent + queue_s
        self.queue_s.observe(queue_s)
        self.prefill_s.observe(first - scheduled)
        self.inference_s.observe(now - scheduled)
        longest = max(lengths)
        if longest:
            self.decode_s.observe(now - first)
            self.request_generation_tokens.observe(sum(lengths))
            self.longest_completion_tokens.observe(longest)
        if longest > 1:
            self.token_s.observe((now - first) / (longest - 1))

    def _hand_over(self, record: FinishedRequest) -> None:
        """Hand the record of a finished request to the listeners."""
        for listener in list(self._listeners):
            try:
                listener(record)
            except Exception:
                logger.exception("a listener to finished requests failed, and is not called again")
                self._listeners.remove(listener)
