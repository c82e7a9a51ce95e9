"""The feed of the page: a snapshot of the engine each second, made once for all viewers."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

import msgspec

from vllm_mp.client.async_llm import AsyncLLM
from vllm_mp.client.images.messages import MAX_FILE_BYTES, MAX_PIXELS
from vllm_mp.client.stats import CoreReading, Counter, Histogram
from vllm_mp.client.stats.cells import Values
from vllm_mp.server.http.admission import Admission
from vllm_mp.server.http.errors import ApiError
from vllm_mp.version import __version__

logger = logging.getLogger(__name__)

MAX_VIEWERS = 64
_INTERVAL_S = 1.0
_CORE_TIMEOUT_S = 0.3
"""Time that the core gets to report its load. After that the status page is read."""
_HISTORY_S = 300.0
"""Age up to which points are kept for new viewers."""
_LATENCY_WINDOW_S = 60.0
_PROMPT_WINDOW_S = 10.0
"""Prompts come in bursts: their rate within a single second says little."""
_MAX_CAUSE = 300
"""Maximum number of characters of a cause."""
_STATES = {
    "STARTING": "loading",
    "LOADING": "loading",
    "RECOVERING": "restarting",
    "DRAINING": "draining",
    "LEFT_OUT": "left out",
    "DEAD": "dead",
}
"""The states of `AsyncLLM.last_core_status` that say more than that the core serves."""


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles of a latency over the last minute, in seconds."""

    p50: float
    p95: float
    p99: float


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a snapshot that the page plots."""

    time: float
    """In seconds since 1970."""
    num_running: int
    """Requests that run in the core, of all its clients."""
    num_waiting: int
    """Requests that wait in the core, of all its clients."""
    kv_cache_usage: float
    """Share of the KV cache in use, 0 to 1."""
    output_tokens_per_s: float | None
    """Over the last second; None in the first snapshot."""
    time_to_first_token: Percentiles | None
    """None if no request got its first token in the last minute."""


class ShownRestart(msgspec.Struct, frozen=True):
    """A restart of the core."""

    time: float
    """When the core died, in seconds since 1970."""
    cause: str
    recovery_s: float | None
    """Seconds until the next core served; None while there is no core."""
    num_recovered: int | None
    """Requests that continue on the next core; None while there is no core."""


class ShownCore(msgspec.Struct, frozen=True):
    """One of several cores."""

    rank: int
    state: str
    """running, loading, restarting, draining, left out or dead."""
    num_running: int
    num_waiting: int
    kv_cache_usage: float
    """Share of the KV cache in use, 0 to 1; 0 if it is unknown."""
    node: str
    """Its node of a Ray cluster, and what is reserved there; empty without Ray."""


class Snapshot(Point, frozen=True, kw_only=True):
    """What the engine does at a moment."""

    state: str
    """running, loading, restarting, paused, asleep, draining or dead."""
    cause: str | None
    """Why the core restarts or is dead; None in other states."""
    incarnation: int
    uptime_s: float
    num_live: int
    """Requests of this client that have not ended."""
    prompt_tokens_per_s: float | None
    """Over the last 10 seconds; None in the first snapshot."""
    inter_token_latency: Percentiles | None
    """None if no request got a second token in the last minute."""
    accepted_drafts: float | None
    """Share of the draft tokens that the core has accepted since its start, 0 to 1; None if there were none."""
    restarts: list[ShownRestart]
    """The latest restarts, the oldest first."""
    cores: list[ShownCore]
    """The cores, if there are several."""


class ImageLimits(msgspec.Struct, frozen=True):
    """What the page must know to send images that the server accepts."""

    max_images: int
    """Images of a conversation."""
    max_file_bytes: int
    max_pixels: int
    """Pixels of an image, width times height."""
    max_body_bytes: int
    """Bytes of a request, whose images are base64."""


class Greeting(msgspec.Struct, frozen=True):
    """The first message to a viewer: facts that do not change, and the points of the last minutes."""

    model: str
    max_model_len: int
    version: str
    history: list[Point]
    images: ImageLimits | None
    """None: the model takes no images."""


class _Reading(NamedTuple):
    """The statistics at a moment."""

    time: float
    """In seconds of `time.monotonic()`."""
    cells: Values


class LiveFeed:
    """Makes snapshots while there are viewers, and nothing without viewers.

    All methods must be called in the event loop's thread.
    """

    def __init__(self, engine: AsyncLLM, admission: Admission, max_body_bytes: int) -> None:
        """`max_body_bytes` is the limit of the server's requests."""
        self._engine = engine
        self._max_body_bytes = max_body_bytes
        self._admission = admission
        self._start_time = time.monotonic()
        self._num_viewers = 0
        self._task: asyncio.Task[None] | None = None
        """Takes the snapshots; None without viewers."""
        self._news = asyncio.Event()
        """Set at each snapshot and at the end of the task, and then replaced."""
        self._latest: bytes | None = None
        """The event of the latest snapshot; None before the first of the task."""
        self._readings: deque[_Reading] = deque()
        """A reading for each snapshot of the last minute, and the last one before it."""
        self._points: deque[Point] = deque()

    def check_capacity(self) -> None:
        """Raise ApiError if there are too many viewers for another."""
        if self._num_viewers == MAX_VIEWERS:
            raise ApiError(
                503,
                f"too many viewers: {MAX_VIEWERS} pages show this server already; close another page",
                type="server_error",
                code="too_many_viewers",
            )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the greeting, then each snapshot, until the server ends; a slow viewer misses snapshots."""
        self._num_viewers += 1
        try:
            if self._task is None or self._task.done():
                self._latest = None
                self._task = asyncio.create_task(self._take_snapshots())
                self._task.add_done_callback(self._end)
            task = self._task
            yield self._greeting()
            if self._latest is not None:
                yield self._latest
            while not task.done():
                await self._news.wait()
                if self._latest is not None:
                    yield self._latest
        finally:
            self._num_viewers -= 1
            if self._num_viewers == 0 and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _take_snapshots(self) -> None:
        """Make a snapshot each second, until the server has shut down."""
        self._readings.clear()  # a rate over the time without viewers would say nothing about the last second
        due = time.monotonic()
        is_last = False
        while not is_last:
            # Decided before the snapshot, so that the last one shows the state in which the server ends.
            is_last = self._admission.refusal is not None and self._admission.num_live == 0
            snapshot = await self._snapshot()
            self._points.append(Point(**{name: getattr(snapshot, name) for name in Point.__struct_fields__}))
            while self._points[0].time < snapshot.time - _HISTORY_S:
                self._points.popleft()
            self._latest = _event(snapshot)
            self._wake_viewers()
            due = max(due + _INTERVAL_S, time.monotonic())
            await asyncio.sleep(0 if is_last else due - time.monotonic())

    def _end(self, task: asyncio.Task[None]) -> None:
        """Let the viewers see that the task has ended; their pages connect again, which starts another."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the feed of the page failed", exc_info=error)
        self._wake_viewers()

    def _wake_viewers(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _greeting(self) -> bytes:
        config = self._engine.model_config
        # The latest snapshot follows as an event of its own.
        points = list(self._points)[: None if self._latest is None else -1]
        images, max_images = None, self._engine.vllm_config.multimodal_config.max_images
        if config.images is not None and max_images:
            images = ImageLimits(max_images, MAX_FILE_BYTES, MAX_PIXELS, self._max_body_bytes)
        facts = Greeting(config.served_model_name, config.max_model_len, __version__, points, images)
        return b"event: hello\n" + _event(facts)

    async def _snapshot(self) -> Snapshot:
        load = await self._engine.read_core_load(_CORE_TIMEOUT_S)
        stats, status = self._engine.stats, self._engine.last_core_status()
        now = time.monotonic()
        self._readings.append(_Reading(now, stats.cells.total()))
        while len(self._readings) > 2 and self._readings[1].time <= now - _LATENCY_WINDOW_S:
            self._readings.popleft()
        cause = status.get("reason")
        return Snapshot(
            time=time.time(),
            num_running=load.num_running if load else 0,
            num_waiting=load.num_waiting if load else 0,
            kv_cache_usage=load.kv_cache_usage if load else 0.0,
            output_tokens_per_s=self._rate(stats.generation_tokens, _INTERVAL_S),
            time_to_first_token=self._percentiles(stats.first_token_s),
            state=self._state(status.get("state"), load),
            cause=None if cause is None else _shorten(cause),
            incarnation=status["incarnation"],
            uptime_s=now - self._start_time,
            num_live=await self._engine.get_num_unfinished_requests(),
            prompt_tokens_per_s=self._rate(stats.prompt_tokens, _PROMPT_WINDOW_S),
            inter_token_latency=self._percentiles(stats.between_tokens_s),
            accepted_drafts=load.accepted_drafts if load else None,
            restarts=[
                ShownRestart(each.time, _shorten(each.cause), each.recovery_s, each.num_recovered)
                for each in stats.restarts
            ],
            cores=[_shown_core(core) for core in status.get("cores", [])],
        )

    def _state(self, core_state: str | None, load: CoreReading | None) -> str:
        """Return the state to show; `core_state` is that of `AsyncLLM.last_core_status`."""
        if core_state in _STATES:
            return _STATES[core_state]
        if self._admission.refusal is not None:
            return "draining"
        if load is not None and load.is_sleeping:
            return "asleep"
        return "paused" if load is not None and load.is_paused else "running"

    def _rate(self, counter: Counter, window_s: float) -> float | None:
        """Return the events per second in the last `window_s` seconds; None before there are two readings."""
        last = self._readings[-1]
        first = self._reading_before(window_s)
        if first is last:
            return None
        count = sum(counter.read(last.cells - first.cells).values())
        return count / (last.time - first.time)

    def _percentiles(self, histogram: Histogram) -> Percentiles | None:
        """Return the percentiles of the observations in the last minute; None without observations."""
        reading = histogram.read(self._readings[-1].cells - self._reading_before(_LATENCY_WINDOW_S).cells)
        p50, p95, p99 = (reading.quantile(share) for share in (0.5, 0.95, 0.99))
        return None if p50 is None or p95 is None or p99 is None else Percentiles(p50, p95, p99)

    def _reading_before(self, window_s: float) -> _Reading:
        """Return the latest reading that is `window_s` seconds old, or nearly so; without such a reading the oldest."""
        start = self._readings[-1].time - window_s + _INTERVAL_S / 2
        return next((reading for reading in reversed(self._readings) if reading.time <= start), self._readings[0])


def _shown_core(status: dict[str, Any]) -> ShownCore:
    """Return what the page shows of a core with a status of `AsyncLLM.last_core_status`."""
    total = status.get("total_blocks", 0)
    return ShownCore(
        status["rank"],
        _STATES.get(status.get("state", ""), "running"),
        status.get("num_running", 0),
        status.get("num_waiting", 0),
        1 - status.get("free_blocks", 0) / total if total else 0.0,
        status.get("node", ""),
    )


def _event(message: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(message) + b"\n\n"


def _shorten(cause: str) -> str:
    """Return the first clause of `cause`, without the log lines that follow it."""
    clause = cause.partition(";")[0].partition("\n")[0]
    return clause if len(clause) <= _MAX_CAUSE else f"{clause[:_MAX_CAUSE]}…"
