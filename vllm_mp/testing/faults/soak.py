"""An engine whose core is killed again and again while streams of every kind begin, go on, end and are aborted."""

import asyncio
import contextlib
import dataclasses
import itertools
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

from vllm_mp import AsyncLLM, RequestOutputKind
from vllm_mp.testing.differential import Case
from vllm_mp.testing.engines import eventually
from vllm_mp.testing.faults.judge import Comparison, nothing_left_behind, resident_mib, what_is_held
from vllm_mp.testing.faults.load import PauseWatch, Watched, outcome_of
from vllm_mp.testing.faults.scenarios import PATIENCE_S, Arena, children, core_address, core_page, there_is_another

_SIGNALS = (signal.SIGKILL,) * 6 + (signal.SIGTERM, signal.SIGTERM, signal.SIGSTOP)
"""Those that come from outside: of a crash the requests in the step are suspected, and after some they are failed."""
_WARM_UP = 5
"""Kills after which this process has loaded whatever it ever will."""
_GROWTH_MIB = 16.0
_GROWTH_SHARE = 0.02
"""What resident memory may have grown by between the first and the last fifth of a soak."""


class Sample(NamedTuple):
    """What is held after a recovery."""

    client_mib: float
    core_mib: float
    descriptors: int
    threads: int
    files: int
    """In the runtime folder."""


@dataclasses.dataclass
class SoakRecord:
    """How a soak went. Times in seconds."""

    kills: int = 0
    """Of cores that served."""
    kills_while_loading: int = 0
    restarts: int = 0
    answers: int = 0
    aborted: int = 0
    tokens: int = 0
    excused: int = 0
    next_token_s: list[float] = dataclasses.field(default_factory=list)
    """From each kill to the first token after it."""
    samples: list[Sample] = dataclasses.field(default_factory=list)
    broken: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    def percentile(self, share: float) -> float:
        ordered = sorted(self.next_token_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def note_growth(self) -> None:
        """Note what has grown from the first fifth of the samples to the last."""
        samples = self.samples[_WARM_UP:]
        fifth = len(samples) // 5
        if not fifth:
            return
        for name, some in (("MiB of the client", "client_mib"), ("MiB of the core", "core_mib")):
            first, last = (
                statistics.median(getattr(one, some) for one in part) for part in (samples[:fifth], samples[-fifth:])
            )
            if last - first > max(_GROWTH_MIB, _GROWTH_SHARE * first):
                self.broken.append(f"{name} grew from {first:.0f} to {last:.0f}")
        for some in ("descriptors", "threads", "files"):
            first, last = (min(getattr(one, some) for one in part) for part in (samples[:fifth], samples[-fifth:]))
            if last > first:
                self.broken.append(f"{some} grew from {first} to {last}")


class Soak:
    """Keeps streams running on one engine and kills its core."""

    def __init__(self, arena: Arena, engine: AsyncLLM, seed: int, is_random: bool) -> None:
        self.record = SoakRecord()
        self._arena = arena
        self._engine = engine
        self._watch = PauseWatch()
        self._watched = Watched(engine, self._watch)
        self._chance = random.Random(seed)
        self._is_random = is_random
        self.comparison = Comparison()
        self._ends = False
        self._folder = Path(core_address(engine).removeprefix("ipc://")).parent

    async def run(self, kills: int | None, seconds: float | None, show: Callable[[SoakRecord], None] | None) -> None:
        """Until there were so many kills, or so many seconds have passed."""
        workers = [asyncio.create_task(self._stream(number)) for number in range(len(self._arena.cases))]
        deadline = None if seconds is None else time.monotonic() + seconds
        try:
            while (kills is None or self.record.kills < kills) and (deadline is None or time.monotonic() < deadline):
                await self._kill_once()
                if show is not None:
                    show(self.record)
            self._ends = True
            await asyncio.wait_for(asyncio.gather(*workers), PATIENCE_S)
            self.record.broken += await what_is_held(self._engine)
            self.record.restarts = (await self._engine.core_status())["restarts"]
            # A core that is killed while it loads is no restart, unless it had just begun to serve.
            if not 0 <= self.record.restarts - self.record.kills <= self.record.kills_while_loading:
                self.record.broken.append(f"{self.record.restarts} restarts after {self.record.kills} kills")
        except Exception as error:  # whatever it is, the promise is broken
            self.record.broken.append(f"{type(error).__name__}: {error}")
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _stream(self, number: int) -> None:
        """One request after the other, until the soak ends."""
        chance = random.Random(f"{number} {self._chance.random()}")
        for turn in itertools.count():
            if self._ends:
                return
            index = (number + turn * 7) % len(self._arena.cases)
            case = self._arena.cases[index]
            if isinstance(case, Case):
                case = dataclasses.replace(case)  # the identity of a case makes the id of its request
            if self._is_random:
                await asyncio.sleep(chance.expovariate(2.0))
                aborts = isinstance(case, Case) and case.kind != RequestOutputKind.FINAL_ONLY and chance.random() < 0.2
                if aborts:
                    case = dataclasses.replace(case, abort_after=chance.randint(1, 12))
                    self.record.aborted += 1
            self.comparison.compare(case, await outcome_of(self._watched, case), self._arena.expected[index])

    async def _kill_once(self) -> None:
        """Kill the core at some moment, and wait for the streams to go on."""
        outputs = self._chance.randint(0, 8 * len(self._arena.cases))
        await eventually(self._has_come(self._watch.num_outputs + outputs), PATIENCE_S)
        page = core_page(self._engine)
        assert page is not None
        signum = self._chance.choice(_SIGNALS) if self._is_random else signal.SIGKILL
        known = children()
        self._watch.strike()
        os.kill(page.pid, signum)
        self.record.kills += 1
        if self._is_random and self._chance.random() < 0.1:
            await self._kill_what_loads(known)
        incarnation = page.incarnation

        async def is_replaced() -> bool:
            page = core_page(self._engine)
            return page is not None and page.incarnation > incarnation

        await eventually(is_replaced, PATIENCE_S)
        await eventually(self._has_come(self._watch.num_outputs + 1), PATIENCE_S)
        if self._watch.next_token_s is not None:
            self.record.next_token_s.append(self._watch.next_token_s)
        self.record.samples.append(self._sample())

    async def _kill_what_loads(self, known: set[int]) -> None:
        """Kill the core that comes next, whose process is not among the `known`, before it serves."""
        await eventually(there_is_another(known), PATIENCE_S)
        for child in children() - known:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
                self.record.kills_while_loading += 1

    def _has_come(self, num_outputs: int) -> Callable[[], Awaitable[bool]]:
        async def condition() -> bool:
            return self._watch.num_outputs >= num_outputs

        return condition

    def _sample(self) -> Sample:
        page = core_page(self._engine)
        assert page is not None
        return Sample(
            resident_mib(),
            resident_mib(page.pid),
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
            len(list(self._folder.iterdir())),
        )


def soak(
    arena: Arena,
    *,
    kills: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    is_random: bool = False,
    show: Callable[[SoakRecord], None] | None = None,
    **options: Any,
) -> SoakRecord:
    """Kill the core of an engine with `options` so many times, or for so many seconds, and report.

    The requests are those of `arena`, each of which begins anew when it has ended. `is_random`: they begin at random
    moments, some are aborted, and the core is also stopped, terminated, and killed while it loads.
    """
    limits = {"max_core_restarts": 10**6, "engine_iteration_timeout_s": 5.0 if is_random else 60.0}
    began = time.monotonic()
    problems: list[str] = []

    def run() -> Soak:
        with arena.engine(**{**limits, **options}) as engine:
            one = Soak(arena, engine, seed, is_random)
            asyncio.run(one.run(kills, seconds, show))
        return one

    with nothing_left_behind(problems):
        done = run()
        record, comparison = done.record, done.comparison
        del done  # which holds the engine
    record.broken += comparison.settle(arena.folder, arena.eos_token_ids) + problems
    record.answers, record.tokens = comparison.num_answers, comparison.num_tokens
    record.excused = comparison.num_excused
    record.note_growth()
    record.seconds = time.monotonic() - began
    return record
