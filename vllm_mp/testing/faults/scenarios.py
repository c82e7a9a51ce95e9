"""What may happen to an engine, and what its users are promised: scenarios to be played on any model."""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import psutil
import zmq

from vllm_mp import AsyncEngineArgs, AsyncLLM, EngineDeadError, EngineGenerateError, RequestOutput, SamplingParams
from vllm_mp.status_page import CoreStatus
from vllm_mp.testing.engines import ENGINE, answer, eventually, greedy, running_engine
from vllm_mp.testing.faults.judge import ROUNDING, Comparison, nothing_left_behind, what_is_held
from vllm_mp.testing.faults.load import AnyOutcome, PauseWatch, Watched, mixed_cases, outcomes_of

PATIENCE_S = 180.0
"""For anything that is waited for; far beyond what it takes, so that slow machines pass."""
_DAY_S = 86_400.0
_COMMON: dict[str, Any] = {"max_logprobs": -1}
_IMPATIENT: dict[str, Any] = {"engine_iteration_timeout_s": 3.0}


class Arena:
    """A model, engine options, and requests whose undisturbed answers are known."""

    def __init__(
        self,
        model: str | Path,
        options: dict[str, Any] | None = None,
        *,
        streams: int = 16,
        max_tokens: int = 48,
        seed: int = 0,
        step: int | None = None,
        after: float | None = None,
        block_s: float = 30.0,
        pace_s: float = 0.0,
    ) -> None:
        """Faults strike at `step` or `after` seconds, or else at a step that `seed` decides.

        `block_s` is how long a client is kept busy where that is the fault, `pace_s` what each step takes longer than
        it needs, so that a small model's streams last until the fault.
        """
        self.model = str(model)
        self.options = {**ENGINE, "check_invariants": False, **(options or {})}
        self.max_tokens = max_tokens
        self.cases = mixed_cases(streams, max_tokens, seed)
        self.block_s = block_s
        self.shared: AsyncLLM | None = None
        self.pace = f"slow@step=*,seconds={pace_s:g}" if pace_s else ""
        self._seed, self._step, self._after = seed, step, after
        with self.engine() as engine:
            self.folder = engine.model_config.folder
            self.eos_token_ids = engine.model_config.eos_token_ids
            self.expected = asyncio.run(outcomes_of(engine, self.cases))

    def step_for(self, name: str) -> int:
        """The step at which the scenario's fault strikes."""
        if self._step is not None:
            return self._step
        return random.Random(f"{self._seed} {name}").randint(2, max(3, 2 * self.max_tokens // 3))

    async def wait_for_moment(self, scene: "Scene") -> None:
        """Return when the fault is to strike, or has struck."""
        if self._after is not None:
            await asyncio.sleep(self._after)
        else:
            page = scene.page()
            step, incarnation = page.step + scene.step, page.incarnation
            await scene.until(lambda page: page.step >= step or page.incarnation > incarnation)

    def engine(self, **options: Any) -> contextlib.AbstractContextManager[AsyncLLM]:
        """An engine with a core of its own."""
        return running_engine(self.model, **{**self.options, **options})

    @contextlib.contextmanager
    def share_engine(self) -> Iterator[AsyncLLM]:
        """An engine for all scenarios that need no options of their own."""
        faults = ";".join([self.pace, *(one.injects for one in SCENARIOS.values())])
        with self.engine(fault_injection=faults, max_core_restarts=1000, **_COMMON) as self.shared:
            yield self.shared
        self.shared = None

    @contextlib.contextmanager
    def core(self, address: str, **options: Any) -> Iterator["subprocess.Popen[str]"]:
        """A stand-alone core; ended by SIGTERM if it still runs."""
        args = AsyncEngineArgs(model=self.model, **{**self.options, **options})
        command = [sys.executable, "-m", "vllm_mp.cli", "engine", "--listen", address, *_flags(args)]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, text=True)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(30)


def _flags(args: AsyncEngineArgs) -> list[str]:
    """The flags of the shell for what is not at its default."""
    flags = []
    for name, value in vars(args).items():
        if value == getattr(type(args), name, None) or value is None:
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return flags


class Scene:
    """An engine in the middle of its streams."""

    def __init__(self, arena: Arena, engine: AsyncLLM, name: str, core: "subprocess.Popen[str] | None" = None) -> None:
        self.arena = arena
        self.engine = engine
        self.step = arena.step_for(name)
        """Counted from the moment at which the streams begin."""
        self.trigger = _trigger(name)
        """Part of the id of a request at which injected faults strike."""
        self.core = core
        """The stand-alone core, where there is one; a scenario that starts another puts it here."""
        self.watch = PauseWatch()
        self.seen: list[str] = []
        self.broken: list[str] = []
        self.cleanup = contextlib.ExitStack()

    def page(self) -> CoreStatus:
        page = core_page(self.engine)
        assert page is not None
        return page

    async def until(self, condition: Callable[[CoreStatus], bool]) -> None:
        """Wait until the status page shows that `condition` holds."""

        async def holds() -> bool:
            page = core_page(self.engine)
            return page is not None and condition(page)

        await eventually(holds, PATIENCE_S)

    def signal(self, signum: int) -> None:
        os.kill(self.page().pid, signum)

    async def ask(self, request_id: str, **params: Any) -> RequestOutput:
        """The answer to a request of that id; raises what `generate` raises."""
        own = {"temperature": 0, "max_tokens": self.arena.max_tokens, "ignore_eos": True, **params}
        return await answer(self.engine, "One, two, three, four,", SamplingParams(**own), request_id)

    async def pull_trigger(self, **params: Any) -> None:
        """Send the request at which the injected fault strikes; it is to be answered like all others."""
        struck, plain = [(await self.ask(name, **params)).outputs[0] for name in (self.trigger, "plain")]
        self.check(
            (struck.token_ids, struck.text, struck.finish_reason) == (plain.token_ids, plain.text, plain.finish_reason),
            f"the request at which the fault struck was answered with {struck}, later with {plain}",
        )

    async def pull_fatal_trigger(self, **params: Any) -> None:
        """Send the request at which the injected fault strikes; it is to fail alone."""
        try:
            output = await self.ask(self.trigger, **params)
            self.broken.append(f"the culprit was answered with {output.outputs[0]}")
        except EngineGenerateError as error:
            self.seen.append(f"the culprit: {str(error).partition(':')[0]}")

    def check(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.broken.append(otherwise)


class Record(NamedTuple):
    """How a scenario went. Times in seconds."""

    name: str
    promise: str
    seen: str
    step: int
    pause_s: float | None
    """From the fault to the next token where the core was replaced, else the longest time without one."""
    restarts: int | None
    answers: int
    tokens: int
    excused: int
    """Requests whose answer differs by rounding alone."""
    broken: list[str]
    seconds: float

    @property
    def verdict(self) -> str:
        return "broken" if self.broken else "kept"


class Scenario(NamedTuple):
    """`play` is called at the moment of the fault, and brings it about."""

    name: str
    promise: str
    play: Callable[[Scene], Awaitable[None]]
    injects: str
    """The engine's `fault_injection`."""
    options: dict[str, Any]
    """Other engine options without which it cannot be played."""
    restarts: int | None
    """How often the core must have been restarted; None: not asked."""
    stands_alone: bool
    """The core is started by hand and the client connects to it."""
    ends_all: bool
    """The engine is dead in the end, and every stream has failed with the cause."""


SCENARIOS: dict[str, Scenario] = {}


def _scenario(
    promise: str,
    *,
    injects: str = "",
    options: dict[str, Any] | None = None,
    restarts: int | None = 1,
    stands_alone: bool = False,
    ends_all: bool = False,
) -> Callable[[Callable[[Scene], Awaitable[None]]], Callable[[Scene], Awaitable[None]]]:
    """Register what a function plays. In `injects` a T stands for the request that has the core strike itself."""

    def register(play: Callable[[Scene], Awaitable[None]]) -> Callable[[Scene], Awaitable[None]]:
        name = play.__name__.replace("_", "-")
        text = injects.replace("T", f"request={_trigger(name)}")
        SCENARIOS[name] = Scenario(name, promise, play, text, options or {}, restarts, stands_alone, ends_all)
        return play

    return register


def _trigger(name: str) -> str:
    return f"fault-{name}."


_GOES_ON = "streams pause and go on, nothing lost or doubled"
_UNDISTURBED = "no restart, nothing lost"


@_scenario(_GOES_ON)
async def kill(scene: Scene) -> None:
    scene.signal(signal.SIGKILL)


@_scenario(_GOES_ON)
async def segv(scene: Scene) -> None:
    scene.signal(signal.SIGSEGV)


@_scenario(_GOES_ON)
async def abort(scene: Scene) -> None:
    scene.signal(signal.SIGABRT)


@_scenario(_GOES_ON)
async def term(scene: Scene) -> None:
    scene.signal(signal.SIGTERM)


@_scenario("found out within the timeout, then as kill", options=_IMPATIENT)
async def stop(scene: Scene) -> None:
    pid = scene.page().pid
    scene.signal(signal.SIGSTOP)
    await _check_detection(scene, pid)


@_scenario("found out within the timeout, then as kill", options=_IMPATIENT, injects="hang@T,position=1,once")
async def hang(scene: Scene) -> None:
    pid = scene.page().pid
    trigger = asyncio.create_task(scene.pull_trigger())
    await _check_detection(scene, pid)
    await trigger


@_scenario("found out within the timeout, then as kill", options=_IMPATIENT, injects="spin@T,position=1,once")
async def spin(scene: Scene) -> None:
    pid = scene.page().pid
    trigger = asyncio.create_task(scene.pull_trigger())
    await _check_detection(scene, pid)
    await trigger


async def _check_detection(scene: Scene, pid: int) -> None:
    """A core that has hung is gone a second after the timeout at the latest."""
    limit = scene.engine.vllm_config.liveness_config.engine_iteration_timeout_s
    await scene.until(lambda page: page.pid != pid or page.heartbeat_age > 0.2)
    hung_at = time.monotonic() - scene.page().heartbeat_age
    await eventually(_has_ended(pid), PATIENCE_S)
    found_after = time.monotonic() - hung_at
    scene.seen.append(f"ended {found_after:.1f} s after its last sign")
    scene.check(found_after < limit + 1, f"found out only after {found_after:.1f} s, with a timeout of {limit:g} s")


def _has_ended(pid: int) -> Callable[[], Awaitable[bool]]:
    async def condition() -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    return condition


@_scenario(_GOES_ON, injects="exit@T,position=1,once")
async def exit_in_step(scene: Scene) -> None:
    await scene.pull_trigger()


@_scenario(_GOES_ON, injects="raise@T,position=1,once")
async def raise_in_step(scene: Scene) -> None:
    await scene.pull_trigger()


@_scenario(_GOES_ON, injects="oom@T,position=1,once")
async def out_of_memory(scene: Scene) -> None:
    await scene.pull_trigger()


@_scenario(_GOES_ON, injects="exit@publish,T,position=1,messages=0,once")
async def exit_before_message(scene: Scene) -> None:
    await scene.pull_trigger()


@_scenario(_GOES_ON, injects="exit@publish,T,position=5,messages=0,once")
async def exit_before_last_message(scene: Scene) -> None:
    """The core dies of the step that has ended a request, which nobody has heard of yet."""
    await scene.pull_trigger(max_tokens=6)


@_scenario(_GOES_ON, injects="exit@publish,T,position=5,messages=1,once")
async def exit_after_last_message(scene: Scene) -> None:
    await scene.pull_trigger(max_tokens=6)


@_scenario(_GOES_ON, injects="exit@publish,T,once")
async def exit_mid_message(scene: Scene) -> None:
    """The core ends when it has sent a part of a message that is larger than a socket takes in at once."""
    params = greedy(4, prompt_logprobs=-1)
    got, again = [await answer(scene.engine, "To be, or not to be", params, name) for name in (scene.trigger, "plain")]
    values = [
        np.array([[entry[token].logprob for token in sorted(entry)] for entry in one.prompt_logprobs[1:]])
        for one in (got, again)
    ]
    scene.check(
        got.outputs[0].token_ids == again.outputs[0].token_ids and bool(np.abs(values[0] - values[1]).max() < ROUNDING),
        "the answer with the large message is not the same when it is asked for again",
    )


@_scenario("as kill, after another attempt", options={"fault_injection": "exit@load,incarnation=2"})
async def exit_while_loading(scene: Scene) -> None:
    scene.signal(signal.SIGKILL)


@_scenario("as kill, after another attempt")
async def kill_while_loading(scene: Scene) -> None:
    known = children()
    scene.signal(signal.SIGKILL)
    await eventually(there_is_another(known), PATIENCE_S)
    for child in children() - known:
        os.kill(child, signal.SIGKILL)


def children() -> set[int]:
    """The child processes of this one that live."""
    return {one.pid for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE}


def there_is_another(known: set[int]) -> Callable[[], Awaitable[bool]]:
    """Whether there is a child process that is not among the `known` ones."""

    async def condition() -> bool:
        return bool(children() - known)

    return condition


@_scenario("the core goes on without its log", injects="fulldisk@T,position=1,once", restarts=0)
async def full_disk(scene: Scene) -> None:
    """Every write to a file fails, while frames that are not of the protocol give the core something to log."""
    await scene.pull_trigger()
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(core_address(scene.engine))
        for _ in range(64):
            stranger.send(b"not of the protocol")

    async def dropped() -> bool:
        return (await scene.engine.core_status())["num_dropped_messages"] >= 64

    await eventually(dropped, PATIENCE_S)


@_scenario(_UNDISTURBED, options=_IMPATIENT, injects="slow@T,seconds=0.5", restarts=0)
async def slow_core(scene: Scene) -> None:
    await scene.pull_trigger(max_tokens=10)


@_scenario("undisturbed; and a kill later costs nothing either")
async def socket_file_removed(scene: Scene) -> None:
    os.unlink(core_address(scene.engine).removeprefix("ipc://"))
    step = scene.page().step
    await scene.until(lambda page: page.step > step + 2)
    scene.watch.strike()
    scene.signal(signal.SIGKILL)


@_scenario("undisturbed; and a kill later costs nothing either")
async def runtime_folder_removed(scene: Scene) -> None:
    shutil.rmtree(Path(core_address(scene.engine).removeprefix("ipc://")).parent)
    step = scene.page().step
    await scene.until(lambda page: page.step > step + 2)
    scene.watch.strike()
    scene.signal(signal.SIGKILL)


@_scenario(_UNDISTURBED, injects=f"clock@T,position=1,seconds=-{_DAY_S:g},once", restarts=0)
async def clock_jumps(scene: Scene) -> None:
    """The time of day jumps by a day, in the core backward and in the client forward."""
    now = time.time

    def tomorrow() -> float:
        return now() + _DAY_S

    scene.cleanup.enter_context(mock.patch("time.time", tomorrow))
    await scene.pull_trigger()


@_scenario(
    "it fails alone after two crashes, the others complete",
    injects="segv@T,position=0",
    restarts=2,
)
async def culprit(scene: Scene) -> None:
    await scene.pull_fatal_trigger()


@_scenario("it fails alone after two crashes, the others complete", injects="raise@T,position=0", restarts=2)
async def culprit_raises(scene: Scene) -> None:
    await culprit(scene)


@_scenario("it fails alone after two crashes, the others complete", injects="segv@T,position=3", restarts=2)
async def culprit_in_mid_answer(scene: Scene) -> None:
    await culprit(scene)


@_scenario(
    "it fails alone, without a restart",
    injects="nan@T,position=2",
    restarts=0,
)
async def nan(scene: Scene) -> None:
    for params in ({}, {"logprobs": 2}, {"temperature": 1.0, "seed": 1}):
        await scene.pull_fatal_trigger(**params)


@_scenario(_UNDISTURBED, restarts=0)
async def client_blocked(scene: Scene) -> None:
    time.sleep(scene.arena.block_s)  # noqa: ASYNC251 - to block it is the point


@_scenario(_GOES_ON)
async def client_blocked_while_core_dies(scene: Scene) -> None:
    scene.signal(signal.SIGKILL)
    time.sleep(scene.arena.block_s)  # noqa: ASYNC251 - to block it is the point


@_scenario(
    "EngineDeadError with the cause, for all",
    options={
        "fault_injection": ";".join(f"exit@load,incarnation={number}" for number in (2, 3, 4)),
        "max_core_restarts": 3,
    },
    restarts=None,
    ends_all=True,
)
async def too_many_deaths(scene: Scene) -> None:
    scene.signal(signal.SIGKILL)


@_scenario("EngineDeadError with the cause, for all", options={"recovery": False}, restarts=None, ends_all=True)
async def no_recovery(scene: Scene) -> None:
    scene.signal(signal.SIGKILL)


_OTHER_CLIENT = """
import asyncio, sys
from vllm_mp import AsyncLLM, SamplingParams
llm = AsyncLLM.connect(sys.argv[1])
async def main():
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    streams = [llm.generate("Hello", params) for _ in range(4)]
    await asyncio.gather(*map(anext, streams))
    print("streaming", flush=True)
    await asyncio.gather(*(anext(stream) for _ in range(10**6) for stream in streams))
asyncio.run(main())
"""


@_scenario("its requests are gone within 2 s, other clients are undisturbed", restarts=0, stands_alone=True)
async def client_killed(scene: Scene) -> None:
    other = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _OTHER_CLIENT, core_address(scene.engine), stdout=asyncio.subprocess.PIPE
    )
    assert other.stdout is not None
    await other.stdout.readline()
    other.kill()
    killed = time.monotonic()
    await other.wait()

    async def only_ours_are_left() -> bool:
        status = await scene.engine.core_status()
        return bool(status["num_running"] + status["num_waiting"] <= scene.engine._requests.num_slots_in_use)

    await eventually(only_ours_are_left, PATIENCE_S)
    seconds = time.monotonic() - killed
    scene.seen.append(f"dropped after {seconds:.2f} s")
    scene.check(seconds < 2, f"the killed client's requests were dropped only after {seconds:.1f} s")


@_scenario("connected clients find the new core and go on", stands_alone=True)
async def core_restarted_by_hand(scene: Scene) -> None:
    assert scene.core is not None
    scene.core.kill()
    scene.core.wait()
    scene.cleanup.enter_context(scene.arena.core(core_address(scene.engine)))


def core_page(engine: AsyncLLM) -> CoreStatus | None:
    """What the status page of the engine's core says."""
    return engine._supervisor.status()


def core_address(engine: AsyncLLM) -> str:
    """Where the engine's core listens."""
    return engine._supervisor.core.connection.address


def play(scenario: Scenario, arena: Arena) -> Record:
    """Play one scenario, and see what became of its promise."""
    began = time.monotonic()
    problems: list[str] = []
    # What belongs to a shared engine is still there.
    with contextlib.nullcontext() if arena.shared else nothing_left_behind(problems):
        record = asyncio.run(_play(scenario, arena))
    return record._replace(broken=[*record.broken, *problems], seconds=time.monotonic() - began)


@contextlib.contextmanager
def _scene(scenario: Scenario, arena: Arena) -> Iterator[Scene]:
    options = {**_COMMON, "fault_injection": scenario.injects, **scenario.options}
    options["fault_injection"] += ";" + arena.pace
    with contextlib.ExitStack() as stack:
        if arena.shared is not None and not scenario.options and not scenario.stands_alone:
            scene = Scene(arena, arena.shared, scenario.name)
        elif scenario.stands_alone:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-"))
            core = stack.enter_context(arena.core(f"ipc://{folder}/core.sock", **options))
            engine = AsyncLLM.connect(f"ipc://{folder}/core.sock", timeout=PATIENCE_S)
            stack.callback(engine.shutdown)
            scene = Scene(arena, engine, scenario.name, core)
        else:
            scene = Scene(arena, stack.enter_context(arena.engine(**options)), scenario.name)
        stack.enter_context(scene.cleanup)
        yield scene


async def _check_the_end(scene: Scene, outcomes: list[AnyOutcome]) -> None:
    """Every stream that had not ended has failed with the cause, and so does whatever is asked of the engine later."""
    for outcome in outcomes:
        if isinstance(outcome, str):
            scene.check(
                outcome.startswith("EngineDeadError") and ("exit code" in outcome or "signal" in outcome),
                f"a stream ended with {outcome!r}",
            )
    failed = sum(isinstance(outcome, str) for outcome in outcomes)
    scene.seen.append(f"{failed} of {len(outcomes)} requests failed with the cause")
    for call in (scene.engine.check_health(), answer(scene.engine, "Hello", greedy(1))):
        try:
            await call
        except EngineDeadError:
            continue
        scene.broken.append("a later call did not raise EngineDeadError")


async def _play(scenario: Scenario, arena: Arena) -> Record:
    comparison, restarts = Comparison(), None
    with _scene(scenario, arena) as scene:
        before = (await scene.engine.core_status())["restarts"]
        streams = asyncio.ensure_future(outcomes_of(Watched(scene.engine, scene.watch), arena.cases))
        moment = asyncio.ensure_future(arena.wait_for_moment(scene))
        try:
            await asyncio.wait((moment, streams), return_when=asyncio.FIRST_COMPLETED)
            scene.check(moment.done(), f"the streams ended before step {scene.step}: choose an earlier one")
            scene.watch.strike()
            await scenario.play(scene)
            outcomes = await asyncio.wait_for(streams, PATIENCE_S)
            if scenario.ends_all:
                await _check_the_end(scene, outcomes)
            else:
                for case, got, expected in zip(arena.cases, outcomes, arena.expected, strict=True):
                    comparison.compare(case, got, expected)
                scene.broken += await what_is_held(scene.engine)
                restarts = (await scene.engine.core_status())["restarts"] - before
                due = scenario.restarts
                scene.check(due in (None, restarts), f"{restarts} restarts where {due} were due")
        except Exception as error:  # a promise that is broken in a way nobody has thought of
            scene.broken.append(f"{type(error).__name__}: {error}")
        finally:
            for task in (moment, streams):
                task.cancel()
            await asyncio.gather(moment, streams, return_exceptions=True)
    broken = scene.broken + comparison.settle(arena.folder, arena.eos_token_ids)
    kept = [f"{restarts} restarts", f"{comparison.num_answers} answers as ever"] if not scenario.ends_all else []
    return Record(
        name=scenario.name,
        promise=scenario.promise,
        seen="; ".join(broken[:1] or kept + scene.seen),
        step=scene.step,
        pause_s=None if scenario.ends_all else scene.watch.next_token_s if restarts else scene.watch.longest,
        restarts=restarts,
        answers=comparison.num_answers,
        tokens=comparison.num_tokens,
        excused=comparison.num_excused,
        broken=broken,
        seconds=0.0,
    )
