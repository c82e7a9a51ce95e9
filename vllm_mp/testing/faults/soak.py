"""Kill an engine's core again and again while streams of every kind begin, go on, end and are aborted."""

import asyncio
import contextlib
import dataclasses
import itertools
import math
import os
import random
import signal
import statistics
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vllm_mp import AsyncLLM, EngineError, LoRARequest, RequestOutputKind
from vllm_mp.cli.bench.load_generator import percentiles
from vllm_mp.core_link.core_status import CoreState, CoreStatus
from vllm_mp.fault_injection import mark_of_strike
from vllm_mp.testing.differential import Case
from vllm_mp.testing.engines import eventually
from vllm_mp.testing.faults.baseline import WAIT_S, Baseline, core_address, core_children, core_page
from vllm_mp.testing.faults.comparison import ComparedAnswers, Comparison
from vllm_mp.testing.faults.leaks import held_by_core, nothing_left_behind, private_mib
from vllm_mp.testing.faults.load import AnyCase, PauseWatch, WatchedEngine, outcome_of
from vllm_mp.testing.faults.operator import Operator
from vllm_mp.testing.faults.scenarios import has_ended, has_new_child

_SIGNALS = (signal.SIGKILL,) * 6 + (signal.SIGTERM, signal.SIGTERM, signal.SIGSTOP)
"""Signals that come from outside. Signals of a crash are left out: after some crashes, suspects are failed."""
_FATAL = tuple(number for number in _SIGNALS if number != signal.SIGSTOP)
"""Those for an idle core: that it is stopped is found out when it is needed."""
_INJECTED = {
    "publishing": "kill@publish,messages=0,once",
    "after publishing": "kill@publish,once",
    "sealing": "kill@seal,probability=0.2,once",
}
"""Moments between two steps, which only the core itself can hit, and the fault that does."""
MOMENTS = ("idle", "prefill", "decode", "any time", *_INJECTED)
"""Moments in the life of a core at which it is killed."""
_WARM_UP = 5
"""Kills after which this process has loaded all that it needs."""
_RETRY_S = 0.1
"""Pause after a call that the core did not answer in time."""
_GROWTH_MIB = 16.0
_GROWTH_SHARE = 0.02
"""Growth of resident memory that is allowed from the first to the last fifth of a soak."""
_MIN_MEMORY_SAMPLES = 3
"""Number of samples that a fifth must have to tell growth of memory from the differences between cores."""
_LATE_THREADS = 2
"""Number of threads that pools may start late; a thread that is left after each death is more than that."""
_OF_TEMPLATES = 2
"""Number of descriptors for template processes, which an operator may have killed at the beginning."""
_OF_IMAGES = 4
"""Number of threads that a client may start late for images; some have a process each, with three descriptors."""


class Sample(NamedTuple):
    """Resources that are held after a recovery."""

    client_mib: float
    core_mib: float
    descriptors: int
    threads: int
    files: int
    """Files in the folder of the core's socket."""

    @classmethod
    def now(cls, core_pid: int, folder: Path) -> "Sample":
        """Return what this process and the core hold."""
        descriptors = len(os.listdir("/proc/self/fd"))
        files = len(list(folder.iterdir()))
        return cls(private_mib(), private_mib(core_pid), descriptors, threading.active_count(), files)


@dataclasses.dataclass
class SoakResult(ComparedAnswers):
    """How a soak went. Times are in seconds."""

    kills: int = 0
    """Kills of cores that served."""
    kills_while_loading: int = 0
    restarts: int = 0
    aborted: int = 0
    """Requests whose consumer aborts them."""
    kills_at: dict[str, int] = dataclasses.field(default_factory=dict)
    """Kills by the moment in the life of the core."""
    recomputed: int = 0
    """Tokens of requests with output that a core had computed, and its successor computed again."""
    found: int = 0
    """Blocks of the KV cache that cores have found there."""
    leaked: int = 0
    """Blocks that were in use in a core without requests."""
    calls: dict[str, int] = dataclasses.field(default_factory=dict)
    """Calls of an operator that were carried out."""
    refused_calls: dict[str, int] = dataclasses.field(default_factory=dict)
    """The others, by name and reason."""
    other_deaths: list[str] = dataclasses.field(default_factory=list)
    """Causes of deaths of a shared core that no kill explains."""
    next_token_s: list[float] = dataclasses.field(default_factory=list)
    """Time from each kill to the first token after it."""
    samples: list[Sample] = dataclasses.field(default_factory=list)
    has_images: bool = False
    """Some of the requests have images."""

    def percentile(self, share: float) -> float:
        """Return the quantile `share` of the times from a kill to the next token, in seconds."""
        return percentiles(self.next_token_s, (share,))[0]

    def settle(self, comparison: Comparison, baseline: Baseline, problems: list[str], began: float) -> None:
        super().settle(comparison, baseline, problems, began)
        self.note_growth()

    def note_growth(self) -> None:
        """Note the resources that grew from the first fifth of the samples to the last."""
        samples = self.samples[_WARM_UP:]
        fifth = len(samples) // 5
        if not fifth:
            return
        # Each sample has a core of its own, whose memory depends on the requests that it has just been given.
        for name, field, statistic in (
            ("MiB of the client", "client_mib", statistics.median),
            ("least MiB of a core", "core_mib", min),
        ):
            first, last = (
                statistic([getattr(sample, field) for sample in part]) for part in (samples[:fifth], samples[-fifth:])
            )
            if fifth >= _MIN_MEMORY_SAMPLES and last - first > max(_GROWTH_MIB, _GROWTH_SHARE * first):
                self.broken.append(f"{name} grew from {first:.0f} to {last:.0f}")
        images = _OF_IMAGES if self.has_images else 0
        descriptors = 3 * images + (_OF_TEMPLATES if self.calls else 0)
        slack = {"threads": _LATE_THREADS + images, "descriptors": descriptors, "files": 0}
        for field, allowed in slack.items():
            first, last = (
                min(getattr(sample, field) for sample in part) for part in (samples[:fifth], samples[-fifth:])
            )
            if last - first > allowed:
                self.broken.append(f"{field} grew from {first} to {last}")


class Disturbance(ABC):
    """Keeps the streams of one or several clients running, and disturbs their core again and again."""

    def __init__(self, baseline: Baseline, clients: Sequence[AsyncLLM], folder: Path, seed: int) -> None:
        """`folder` holds the core's socket."""
        self.result = SoakResult(has_images=any(isinstance(case.prompt, dict) for case in baseline.cases))
        self.comparison = Comparison()
        self._baseline = baseline
        self._watch = PauseWatch()
        self._clients = [WatchedEngine(client, self._watch) for client in clients]
        self._folder = folder
        self._chance = random.Random(seed)
        self._is_over = False
        self._may_send = asyncio.Event()
        """Not set: no stream sends its next request."""
        self._may_send.set()

    async def run(self, kills: int | None, seconds: float | None, show: Callable[[SoakResult], None] | None) -> None:
        """Disturb until the number of `kills` or `seconds` is reached. Call `show` after each recovery."""
        streams = range(len(self._baseline.cases))
        workers = [asyncio.create_task(self._stream(client, i)) for client in self._clients for i in streams]
        workers += [asyncio.create_task(companion) for companion in self._companions()]
        deadline = None if seconds is None else time.monotonic() + seconds
        try:
            while (kills is None or self.result.kills < kills) and (deadline is None or time.monotonic() < deadline):
                await self._disturb()
                if show is not None:
                    show(self.result)
            self._is_over = True
            await asyncio.wait_for(asyncio.gather(*workers), WAIT_S)
            self.result.broken += await self._held_at_end()
            self.result.restarts = (await self._core_status())["restarts"]
            # A core that is killed while it loads does not count as restarted, unless it had just begun to serve.
            if not 0 <= self.result.restarts - self.result.kills <= self._most_other_restarts():
                others = "".join(f"; {cause}" for cause in self.result.other_deaths)
                self.result.broken.append(f"{self.result.restarts} restarts after {self.result.kills} kills{others}")
        except Exception as error:  # any unexpected error breaks the promise
            self.result.broken.append(f"{type(error).__name__}: {error}")
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    @abstractmethod
    async def _disturb(self) -> None:
        """Disturb after a random number of outputs, and wait until the streams go on."""

    def _companions(self) -> list[Coroutine[Any, Any, None]]:
        """Return what runs beside the streams until `_is_over`."""
        return []

    def _most_other_restarts(self) -> float:
        """Return how many restarts there may be beside those of the kills."""
        return self.result.kills_while_loading

    async def _held_at_end(self) -> list[str]:
        """Return what the core still holds once the streams have ended, and must not hold."""
        return []

    async def _vary(self, case: AnyCase, chance: random.Random) -> AnyCase:
        """Return the request to send in place of `case`, when it is time to send it."""
        return case

    async def _stream(self, client: WatchedEngine, number: int) -> None:
        """Send one request after another until the soak ends."""
        chance = random.Random(f"{number} {self._chance.random()}")
        for turn in itertools.count():
            if self._is_over:
                return
            index = (number + turn * 7) % len(self._baseline.cases)
            case: AnyCase = self._baseline.cases[index]
            if isinstance(case, Case):
                case = dataclasses.replace(case)  # a request id is made of the identity of its case
            case = await self._vary(case, chance)
            await self._may_send.wait()
            self.comparison.compare(case, await outcome_of(client, case), self._baseline.expected[index])

    async def _outputs(self, count: int) -> None:
        """Wait for `count` more outputs."""
        target = self._watch.num_outputs + count

        async def have_come() -> bool:
            return self._watch.num_outputs >= target

        await eventually(have_come, WAIT_S)

    async def _core_status(self) -> dict[str, Any]:
        """Return the core's status; on a busy machine, the core may take longer to answer than a call waits."""
        async with asyncio.timeout(WAIT_S):
            while True:
                with contextlib.suppress(EngineError):
                    status: dict[str, Any] = await self._clients[0].core_status()
                    return status
                await asyncio.sleep(_RETRY_S)

    def _note_recovery(self, core_pid: int) -> None:
        """Note the time to the next token, and what this process and the core hold."""
        if self._watch.next_token_s is not None:
            self.result.next_token_s.append(self._watch.next_token_s)
        self.result.samples.append(Sample.now(core_pid, self._folder))


class Soak(Disturbance):
    """Keeps streams running on one engine and kills its core, at all moments of its life in turn."""

    def __init__(
        self, baseline: Baseline, engine: AsyncLLM, seed: int, is_random: bool, spare: LoRARequest | None, calls: bool
    ) -> None:
        super().__init__(baseline, [engine], Path(core_address(engine).removeprefix("ipc://")).parent, seed)
        self._engine = engine
        self._is_random = is_random
        self._operator = Operator(engine, lambda: self._page().pid, spare, seed) if calls else None
        self._moments: list[str] = []
        """Those that are left of this round."""
        for index in range(len(_INJECTED)):
            mark_of_strike(self._folder, index).touch()  # until `_strike` removes the mark

    def _companions(self) -> list[Coroutine[Any, Any, None]]:
        return [] if self._operator is None else [self._operator.run(lambda: self._is_over)]

    def _most_other_restarts(self) -> float:
        # An operator replaces cores, and a core may end with a process that the operator kills.
        return super()._most_other_restarts() if self._operator is None else math.inf

    async def _held_at_end(self) -> list[str]:
        await self._note_status()
        if self._operator is not None:
            self.result.calls, self.result.refused_calls = dict(self._operator.num_done), dict(self._operator.refused)
        return await held_by_core(self._engine)

    async def _vary(self, case: AnyCase, chance: random.Random) -> AnyCase:
        if self._is_random:
            await asyncio.sleep(chance.expovariate(2.0))
            if isinstance(case, Case) and case.kind != RequestOutputKind.FINAL_ONLY and chance.random() < 0.2:
                case = dataclasses.replace(case, abort_after=chance.randint(1, 12))
                self.result.aborted += 1
        return case

    async def _disturb(self) -> None:
        await self._outputs(self._chance.randint(0, 8 * len(self._baseline.cases)))
        moment = self._next_moment()
        if moment == "idle":
            await self._be_idle()
        await self._note_status()
        known, page = core_children(), self._page()
        await self._strike(moment, page.pid)
        self.result.kills += 1
        self.result.kills_at[moment] = self.result.kills_at.get(moment, 0) + 1
        if self._is_random and self._chance.random() < 0.1:
            await self._kill_loading_core(known)

        async def is_replaced() -> bool:
            return self._page().incarnation > page.incarnation

        await eventually(is_replaced, WAIT_S)
        self._may_send.set()
        await self._outputs(1)
        if moment == "idle":
            self._watch.resumed_at = None  # no stream has waited
        self._note_recovery(self._page().pid)

    def _next_moment(self) -> str:
        """Return the moment of the next kill: all of them in turn, in a random order each time."""
        if not self._moments:
            self._moments = self._chance.sample(MOMENTS, len(MOMENTS))
        return self._moments.pop()

    def _page(self) -> CoreStatus:
        page = core_page(self._engine)
        assert page is not None
        return page

    async def _strike(self, moment: str, pid: int) -> None:
        """Let the core `pid` end at `moment`."""
        if moment in _INJECTED:
            mark_of_strike(self._folder, list(_INJECTED).index(moment)).unlink()
            await eventually(has_ended(pid), WAIT_S)
            self._watch.strike()
            return
        if moment in ("prefill", "decode"):

            async def is_in_such_a_step() -> bool:
                page = self._page()
                reads_prompts = any(progress < 0 for _, _, progress in page.step_requests)
                return bool(page.step_requests) and reads_prompts == (moment == "prefill")

            await eventually(is_in_such_a_step, WAIT_S)
        self._watch.strike()
        signals = _FATAL if moment == "idle" else _SIGNALS
        with contextlib.suppress(ProcessLookupError):  # the operator has replaced this core
            os.kill(pid, self._chance.choice(signals) if self._is_random else signal.SIGKILL)

    async def _be_idle(self) -> None:
        """Send nothing more, and return when the core has ended all requests; note the blocks that it has not freed."""
        self._may_send.clear()

        async def is_idle() -> bool:
            page = self._page()
            return page.state == CoreState.IDLE and page.num_running == page.num_waiting == 0

        await eventually(is_idle, WAIT_S)
        status = await self._core_status()
        self.result.leaked += status["total_blocks"] - status["free_blocks"]

    async def _note_status(self) -> None:
        """Note what the core has computed again, and found in the KV cache of its predecessor."""
        status = await self._core_status()
        self.result.recomputed += status["num_recomputed_tokens"]
        self.result.found += status["num_found_blocks"]

    async def _kill_loading_core(self, known: set[int]) -> None:
        """Kill the next core, or its standby, whose process is not among the `known` ones, before it serves."""
        await eventually(has_new_child(known), WAIT_S)
        for child in core_children() - known:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
                self.result.kills_while_loading += 1


def run_soak(
    baseline: Baseline,
    *,
    kills: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    is_random: bool = False,
    calls: bool = False,
    spare: LoRARequest | None = None,
    show: Callable[[SoakResult], None] | None = None,
    **options: Any,
) -> SoakResult:
    """Kill the core of an engine with `options` `kills` times, or for `seconds`, and return how it went.

    The requests come from `baseline`; each is sent again when it has ended. The core is killed while it is idle, reads
    prompts, decodes, publishes a step, writes what the blocks of its KV cache hold, and at any time. With `is_random`
    requests start at random moments, some are aborted, and the core is also stopped, terminated, and killed while it
    loads. With `calls` an `Operator` disturbs the engine meanwhile, who adds and removes the adapter `spare`.
    """
    limits = {"max_core_restarts": 10**6, "engine_iteration_timeout_s": 5.0 if is_random else 60.0}
    options["fault_injection"] = ";".join([*_INJECTED.values(), options.get("fault_injection", "")])
    began = time.monotonic()
    problems: list[str] = []

    def run() -> tuple[SoakResult, Comparison]:
        with baseline.engine(**{**limits, **options}) as engine:
            soak = Soak(baseline, engine, seed, is_random, spare, calls)
            asyncio.run(soak.run(kills, seconds, show))
        return soak.result, soak.comparison

    with nothing_left_behind(problems):
        result, comparison = run()  # nothing here holds the engine
    result.settle(comparison, baseline, problems, began)
    return result
