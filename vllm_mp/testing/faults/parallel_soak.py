"""Kill one of several cores of an engine again and again, and measure how long its streams wait for other cores."""

import asyncio
import contextlib
import dataclasses
import itertools
import os
import random
import signal
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from vllm_mp import AsyncLLM, RequestOutputKind, SamplingParams
from vllm_mp.cli.bench.load_generator import percentiles
from vllm_mp.client.outputs.stream import RequestStream
from vllm_mp.testing.differential import Case
from vllm_mp.testing.engines import eventually
from vllm_mp.testing.faults.baseline import WAIT_S, Baseline
from vllm_mp.testing.faults.comparison import ComparedAnswers, Comparison
from vllm_mp.testing.faults.leaks import held_by_core, nothing_left_behind
from vllm_mp.testing.faults.load import AnyCase, outcome_of


@dataclasses.dataclass
class ParallelSoakResult(ComparedAnswers):
    """How a soak of several cores went. Times are in seconds."""

    kills: int = 0
    moved: int = 0
    """Streams that had an output when their core was killed."""
    gap_s: list[float] = dataclasses.field(default_factory=list)
    """Of each of the `moved` streams, the time from the kill to its next output."""
    restart_s: list[float] = dataclasses.field(default_factory=list)
    """Time from each kill until the killed core served again."""
    token_s: float = 0.0
    """Time that an idle core takes to read a token, of many prompts at once."""
    excess_s: list[float] = dataclasses.field(default_factory=list)
    """The times of `gap_s`, each less the time of reading all tokens that moved at that kill."""

    def gap_percentile(self, share: float) -> float:
        """Return the quantile `share` of `gap_s`, in seconds."""
        return percentiles(self.gap_s, (share,))[0]

    def excess_percentile(self, share: float) -> float:
        """Return the quantile `share` of `excess_s`, in seconds."""
        return percentiles(self.excess_s, (share,))[0]


class _WatchedEngine:
    """An engine that notes when each stream of text had its latest output."""

    def __init__(self, engine: AsyncLLM, result: ParallelSoakResult) -> None:
        self._engine = engine
        self._result = result
        self._seen: set[str] = set()
        """Ids of live streams that show each token and have had an output."""
        self._struck: dict[str, float] = {}
        """When the core of such a stream was killed that has had no output since."""
        self._reading_s = 0.0
        """Time that reading all tokens takes that the latest kill moves."""
        self.num_outputs = 0

    async def generate(self, prompt: Any, params: Any, request_id: str, **options: Any) -> AsyncGenerator[Any, None]:
        shows_tokens = params.output_kind != RequestOutputKind.FINAL_ONLY and params.prompt_logprobs is None
        try:
            async for output in self._engine.generate(prompt, params, request_id, **options):
                self.num_outputs += 1
                if (struck := self._struck.pop(request_id, None)) is not None:
                    gap_s = time.monotonic() - struck
                    self._result.gap_s.append(gap_s)
                    self._result.excess_s.append(gap_s - self._reading_s)
                if shows_tokens:
                    self._seen.add(request_id)
                yield output
        finally:
            self._seen.discard(request_id)
            self._struck.pop(request_id, None)

    def strike(self, streams: list[RequestStream]) -> None:
        """Note that the core of these streams is killed now."""
        num_tokens = sum(
            len(stream.prompt_token_ids) + sum(awaited.num_tokens for awaited in stream.awaited) for stream in streams
        )
        self._reading_s = num_tokens * self._result.token_s
        struck = [stream.request_id for stream in streams if stream.request_id in self._seen]
        self._struck.update(dict.fromkeys(struck, time.monotonic()))
        self._result.moved += len(struck)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class _ParallelSoak:
    """Keeps streams running on an engine with several cores, and kills either of them."""

    def __init__(self, baseline: Baseline, engine: AsyncLLM, seed: int) -> None:
        self.result = ParallelSoakResult()
        self.comparison = Comparison()
        self._baseline = baseline
        self._engine = engine
        self._watched = _WatchedEngine(engine, self.result)
        self._chance = random.Random(seed)
        self._is_over = False

    async def run(self, kills: int, show: Callable[[ParallelSoakResult], None] | None) -> None:
        self.result.token_s = await self._time_token()
        workers = [asyncio.create_task(self._stream(i)) for i in range(len(self._baseline.cases))]
        try:
            for _ in range(kills):
                await self._kill()
                if show is not None:
                    show(self.result)
            self._is_over = True
            await asyncio.wait_for(asyncio.gather(*workers), WAIT_S)
            self.result.broken += await held_by_core(self._engine)
            restarts = (await self._engine.core_status())["restarts"]
            if restarts != kills:
                self.result.broken.append(f"{restarts} restarts after {kills} kills")
        except Exception as error:  # any unexpected error breaks the promise
            self.result.broken.append(f"{type(error).__name__}: {error}")
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _kill(self) -> None:
        """Kill a core after a random number of outputs, and wait until it serves again."""
        await self._outputs(self._chance.randint(0, 8 * len(self._baseline.cases)))
        client = self._chance.choice(self._engine.cores.clients)
        process = client.supervisor.core.process
        assert process is not None
        incarnation, began = client.incarnation, time.monotonic()
        self._watched.strike(client.requests.streams())
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        self.result.kills += 1

        async def serves_again() -> bool:
            return client.has_core and client.incarnation > incarnation

        await eventually(serves_again, WAIT_S)
        self.result.restart_s.append(time.monotonic() - began)

    async def _outputs(self, count: int) -> None:
        """Wait for `count` more outputs."""
        target = self._watched.num_outputs + count

        async def have_come() -> bool:
            return self._watched.num_outputs >= target

        await eventually(have_come, WAIT_S)

    async def _stream(self, number: int) -> None:
        """Send one request after another until the soak ends."""
        for turn in itertools.count():
            if self._is_over:
                return
            index = (number + turn * 7) % len(self._baseline.cases)
            case: AnyCase = self._baseline.cases[index]
            if isinstance(case, Case):
                case = dataclasses.replace(case)  # a request id is made of the identity of its case
            self.comparison.compare(case, await outcome_of(self._watched, case), self._baseline.expected[index])  # type: ignore[arg-type]

    async def _time_token(self) -> float:
        """Return the time per token that an idle core takes to read as many prompts at once as a death moves."""
        length = max(len(case.prompt) for case in self._baseline.cases)
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)

        async def read(number: int) -> int:
            num_tokens = 0
            async for output in self._engine.generate(f"{number} {' a' * length}"[:length], params):
                num_tokens = len(output.prompt_token_ids or ())
            return num_tokens

        await read(-1)  # the first step of a core takes longer
        began = time.monotonic()
        num_read = await asyncio.gather(*(read(number) for number in range(len(self._baseline.cases) // 2)))
        return (time.monotonic() - began) * len(self._engine.core_ranks) / sum(num_read)


def run_parallel_soak(
    baseline: Baseline,
    *,
    kills: int,
    num_cores: int = 2,
    seed: int = 0,
    show: Callable[[ParallelSoakResult], None] | None = None,
    **options: Any,
) -> ParallelSoakResult:
    """Kill either of `num_cores` cores of an engine with `options` `kills` times, and return how it went.

    The requests come from `baseline`; each is sent again when it has ended. The next kill waits until the killed core
    serves again.
    """
    began = time.monotonic()
    problems: list[str] = []

    def run() -> tuple[ParallelSoakResult, Comparison]:
        limits = {"data_parallel_size": num_cores, "max_core_restarts": 10**6}
        with baseline.engine(**{**limits, **options}) as engine:
            soak = _ParallelSoak(baseline, engine, seed)
            asyncio.run(soak.run(kills, show))
        return soak.result, soak.comparison

    with nothing_left_behind(problems):
        result, comparison = run()  # nothing here holds the engine
    result.settle(comparison, baseline, problems, began)
    return result
