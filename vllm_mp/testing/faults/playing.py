"""Play a scenario: cause a fault in the middle of an engine's streams, and check the promise that users are given."""

import asyncio
import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

from vllm_mp import AsyncLLM, EngineDeadError, EngineGenerateError, RequestOutput, SamplingParams
from vllm_mp.core_link.core_status import CoreStatus
from vllm_mp.testing.engines import answer, eventually, greedy
from vllm_mp.testing.faults.baseline import COMMON_OPTIONS, WAIT_S, Baseline, core_page
from vllm_mp.testing.faults.comparison import Comparison
from vllm_mp.testing.faults.leaks import held_by_core, nothing_left_behind
from vllm_mp.testing.faults.load import AnyOutcome, PauseWatch, WatchedEngine, outcomes_of


class ScenarioRun:
    """An engine in the middle of its streams, as a scenario sees it."""

    def __init__(
        self, baseline: Baseline, engine: AsyncLLM, name: str, core: "subprocess.Popen[str] | None" = None
    ) -> None:
        self.baseline = baseline
        self.engine = engine
        self.step = baseline.step_for(name)
        """The step at which the fault strikes, counted from the start of the streams."""
        self.trigger = trigger_of(name)
        """Part of the id of the request at which injected faults strike."""
        self.core = core
        """The parent of the standalone core, if the scenario has one."""
        self.watch = PauseWatch()
        self.seen: list[str] = []
        """Observations to report if the promise was kept."""
        self.broken: list[str] = []
        """How the promise was broken."""
        self.cleanup = contextlib.ExitStack()
        """Closed when the scenario has ended."""

    def page(self) -> CoreStatus:
        """Return the contents of the core's status page."""
        page = core_page(self.engine)
        assert page is not None
        return page

    async def until(self, condition: Callable[[CoreStatus], bool]) -> None:
        """Wait until `condition` holds for the status page."""

        async def holds() -> bool:
            page = core_page(self.engine)
            return page is not None and condition(page)

        await eventually(holds, WAIT_S)

    async def wait_for_moment(self) -> None:
        """Return when it is time for the fault, or when an injected fault has already ended the core."""
        if self.baseline.after is not None:
            await asyncio.sleep(self.baseline.after)
        else:
            page = self.page()
            step, incarnation = page.step + self.step, page.incarnation
            await self.until(lambda page: page.step >= step or page.incarnation > incarnation)

    def signal(self, signum: int) -> None:
        """Send a signal to the core."""
        os.kill(self.page().pid, signum)

    async def ask(self, request_id: str, prompt: str = "One, two, three, four,", **params: Any) -> RequestOutput:
        """Return the last output of a request with this id; raise what `generate` raises."""
        own = {"temperature": 0, "max_tokens": self.baseline.max_tokens, "ignore_eos": True, **params}
        return await answer(self.engine, prompt, SamplingParams(**own), request_id)

    async def pull_trigger(self, **params: Any) -> None:
        """Send the request at which the injected fault strikes; check that its output is the undisturbed one."""
        struck, plain = [(await self.ask(name, **params)).outputs[0] for name in (self.trigger, "plain")]
        self.check(
            (struck.token_ids, struck.text, struck.finish_reason) == (plain.token_ids, plain.text, plain.finish_reason),
            f"the request at which the fault struck was answered with {struck}, later with {plain}",
        )

    async def pull_fatal_trigger(self, **params: Any) -> None:
        """Send the request at which the injected fault strikes; check that it fails with EngineGenerateError."""
        try:
            # A prompt of its own, because requests that are equal to a culprit are refused for a while.
            output = await self.ask(self.trigger, f"The culprit of {self.trigger}", **params)
            self.broken.append(f"the culprit was answered with {output.outputs[0]}")
        except EngineGenerateError as error:
            self.seen.append(f"the culprit: {str(error).partition(':')[0]}")

    def check(self, holds: bool, otherwise: str) -> None:
        """Note the message `otherwise` as a broken promise unless `holds`."""
        if not holds:
            self.broken.append(otherwise)


class Scenario(NamedTuple):
    """A fault, and what is promised to users when it strikes."""

    name: str
    promise: str
    play: Callable[[ScenarioRun], Awaitable[None]]
    """Causes the fault, if the engine does not inject it; called at the time of the fault."""
    injects: str
    """The engine's `fault_injection`."""
    options: dict[str, Any]
    """Other engine options that the scenario needs."""
    restarts: int | None
    """How often the core must have been restarted; None: any number of times."""
    stands_alone: bool
    """The core is started by `vllm-mp engine`, and the client connects to it."""
    ends_all: bool
    """The engine is dead at the end, and every stream has failed with the cause."""


class ScenarioResult(NamedTuple):
    """How a scenario went. Times are in seconds."""

    name: str
    promise: str
    seen: str
    step: int
    pause_s: float | None
    """From the fault to the next token if the core was replaced, else the longest time without any token."""
    restarts: int | None
    answers: int
    """Completions and vectors that were compared."""
    tokens: int
    excused: int
    """Requests whose outcome differs by rounding only."""
    broken: list[str]
    seconds: float

    @property
    def verdict(self) -> str:
        return "broken" if self.broken else "kept"


def trigger_of(name: str) -> str:
    """Return the part of a request id at which the injected fault of the scenario `name` strikes."""
    return f"fault-{name}."


def play(scenario: Scenario, baseline: Baseline) -> ScenarioResult:
    """Play one scenario, and check its promise."""
    began = time.monotonic()
    problems: list[str] = []
    # A shared engine goes on after the scenario and keeps its resources.
    with contextlib.nullcontext() if baseline.shared else nothing_left_behind(problems):
        result = asyncio.run(_play(scenario, baseline))
    return result._replace(broken=[*result.broken, *problems], seconds=time.monotonic() - began)


@contextlib.contextmanager
def _running(scenario: Scenario, baseline: Baseline) -> Iterator[ScenarioRun]:
    """Run the engine that the scenario needs."""
    options = {**COMMON_OPTIONS, "fault_injection": scenario.injects, **scenario.options}
    options["fault_injection"] += ";" + baseline.pace
    with contextlib.ExitStack() as stack:
        if baseline.shared is not None and not scenario.options and not scenario.stands_alone:
            run = ScenarioRun(baseline, baseline.shared, scenario.name)
        elif scenario.stands_alone:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-"))
            core = stack.enter_context(baseline.core(f"ipc://{folder}/core.sock", **options))
            engine = AsyncLLM.connect(f"ipc://{folder}/core.sock", timeout=WAIT_S)
            stack.callback(engine.shutdown)
            run = ScenarioRun(baseline, engine, scenario.name, core)
        else:
            run = ScenarioRun(baseline, stack.enter_context(baseline.engine(**options)), scenario.name)
        stack.enter_context(run.cleanup)
        yield run


async def _check_engine_is_dead(run: ScenarioRun, outcomes: list[AnyOutcome]) -> None:
    """Check that every stream that had not ended failed with the cause, and that later calls fail too."""
    for outcome in outcomes:
        if isinstance(outcome, str):
            run.check(
                outcome.startswith("EngineDeadError") and ("exit code" in outcome or "signal" in outcome),
                f"a stream ended with {outcome!r}",
            )
    num_failed = sum(isinstance(outcome, str) for outcome in outcomes)
    run.seen.append(f"{num_failed} of {len(outcomes)} requests failed with the cause")
    for call in (run.engine.check_health(), answer(run.engine, "Hello", greedy(1))):
        try:
            await call
        except EngineDeadError:
            continue
        run.broken.append("a later call did not raise EngineDeadError")


async def _play(scenario: Scenario, baseline: Baseline) -> ScenarioResult:
    comparison, restarts = Comparison(), None
    with _running(scenario, baseline) as run:
        before = (await run.engine.core_status())["restarts"]
        streams = asyncio.ensure_future(outcomes_of(WatchedEngine(run.engine, run.watch), baseline.cases))
        moment = asyncio.ensure_future(run.wait_for_moment())
        try:
            await asyncio.wait((moment, streams), return_when=asyncio.FIRST_COMPLETED)
            if streams.done():
                after = baseline.after
                moment_name = f"step {run.step}" if after is None else f"{after:g} s had passed"
                raise ValueError(
                    f"the streams ended before {moment_name}, so no fault was caused: "
                    f"choose an earlier moment, or more output tokens than {baseline.max_tokens}"
                )
            await moment
            run.watch.strike()
            await scenario.play(run)
            outcomes = await asyncio.wait_for(streams, WAIT_S)
            if scenario.ends_all:
                await _check_engine_is_dead(run, outcomes)
            else:
                for case, got, expected in zip(baseline.cases, outcomes, baseline.expected, strict=True):
                    comparison.compare(case, got, expected)
                run.broken += await held_by_core(run.engine)
                restarts = (await run.engine.core_status())["restarts"] - before
                run.check(
                    scenario.restarts in (None, restarts),
                    f"the core was restarted {restarts} times; expected {scenario.restarts}",
                )
        except Exception as error:  # any unexpected error breaks the promise
            run.broken.append(f"{type(error).__name__}: {error}")
        finally:
            for task in (moment, streams):
                task.cancel()
            await asyncio.gather(moment, streams, return_exceptions=True)
    broken = run.broken + comparison.settle(baseline.folder, baseline.eos_token_ids)
    kept: list[str] = []
    if not scenario.ends_all:
        kept = [f"{restarts} restarts", f"{comparison.num_answers} completions and vectors unchanged"]
    return ScenarioResult(
        name=scenario.name,
        promise=scenario.promise,
        seen="; ".join(broken[:1] or kept + run.seen),
        step=run.step,
        pause_s=None if scenario.ends_all else run.watch.next_token_s if restarts else run.watch.longest,
        restarts=restarts,
        answers=comparison.num_answers,
        tokens=comparison.num_tokens,
        excused=comparison.num_excused,
        broken=broken,
        seconds=0.0,
    )
