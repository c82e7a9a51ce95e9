"""The lag of an event loop: how late a task that only sleeps is woken."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import NamedTuple

from vllm_mp.cli.bench.load_generator import percentiles

_INTERVAL_S = 0.001


class Lag(NamedTuple):
    """The delay of wake-ups, in ms."""

    p50: float
    p99: float
    max: float
    p99_busy: float
    """Processor time that the loop's thread used between wake-ups: the lag without other processes and threads."""


class Heartbeat:
    """The wake-ups of a task that sleeps for a millisecond at a time."""

    def __init__(self) -> None:
        self._late_ms: list[float] = []
        self._busy_ms: list[float] = []

    @property
    def lag(self) -> Lag:
        """The lateness of all wake-ups, at least one."""
        return Lag(*percentiles(self._late_ms, (0.5, 0.99, 1.0)), *percentiles(self._busy_ms, (0.99,)))

    async def run(self) -> None:
        """Record wake-ups until the task is cancelled."""
        while True:
            start, busy = time.perf_counter(), time.thread_time()
            await asyncio.sleep(_INTERVAL_S)
            self._late_ms.append(1000 * (time.perf_counter() - start - _INTERVAL_S))
            self._busy_ms.append(1000 * (time.thread_time() - busy))


@contextlib.asynccontextmanager
async def heartbeat() -> AsyncIterator[Heartbeat]:
    """Measure the lag of the running event loop."""
    beat = Heartbeat()
    task = asyncio.create_task(beat.run())
    try:
        yield beat
        # An event loop that was blocked to the end wakes the task now.
        await asyncio.sleep(2 * _INTERVAL_S)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
