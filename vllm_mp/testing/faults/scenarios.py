"""The scenarios: faults that may strike an engine, and what its users are promised. They work with any model."""

import asyncio
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import psutil
import zmq

from vllm_mp import RequestOutput, SamplingParams, StructuredOutputsParams
from vllm_mp.testing.engines import answer, eventually, greedy, rest
from vllm_mp.testing.faults.baseline import WAIT_S, core_address, core_children
from vllm_mp.testing.faults.comparison import ROUNDING
from vllm_mp.testing.faults.playing import Scenario, ScenarioRun, trigger_of

_DAY_S = 86_400.0
SHORT_TIMEOUT: dict[str, Any] = {"engine_iteration_timeout_s": 3.0}

SCENARIOS: dict[str, Scenario] = {}

_Play = Callable[[ScenarioRun], Awaitable[None]]


def scenario(
    promise: str,
    *,
    injects: str = "",
    options: dict[str, Any] | None = None,
    restarts: int | None = 1,
    stands_alone: bool = False,
    ends_all: bool = False,
) -> Callable[[_Play], _Play]:
    """Register a function as a scenario. A T in `injects` stands for the request that the injected fault strikes."""

    def register(play: _Play) -> _Play:
        name = play.__name__.replace("_", "-")
        text = injects.replace("T", f"request={trigger_of(name)}")
        SCENARIOS[name] = Scenario(name, promise, play, text, options or {}, restarts, stands_alone, ends_all)
        return play

    return register


GOES_ON = "streams pause and go on, nothing lost or doubled"
_UNDISTURBED = "no restart, nothing lost"
DETECTED = "detected within the timeout, then as kill"
_CULPRIT_FAILS = "the request fails alone after at most 3 + log2(requests) crashes, the others complete"
_ALL_FAIL = "EngineDeadError with the cause, for all"
_KILL_LATER = "undisturbed; a later kill costs nothing either"
_NEXT_ATTEMPT = "as kill, after another attempt"


@scenario(GOES_ON)
async def kill(run: ScenarioRun) -> None:
    run.signal(signal.SIGKILL)


@scenario(GOES_ON)
async def segv(run: ScenarioRun) -> None:
    run.signal(signal.SIGSEGV)


@scenario(GOES_ON)
async def abort(run: ScenarioRun) -> None:
    run.signal(signal.SIGABRT)


@scenario(GOES_ON)
async def term(run: ScenarioRun) -> None:
    run.signal(signal.SIGTERM)


@scenario(DETECTED, options=SHORT_TIMEOUT)
async def stop(run: ScenarioRun) -> None:
    pid = run.page().pid
    run.signal(signal.SIGSTOP)
    waiting = asyncio.create_task(run.ask("plain"))  # a stopped core hangs only if it has work
    await _check_detection(run, pid)
    await waiting


@scenario(DETECTED, options=SHORT_TIMEOUT, injects="hang@T,position=1,once")
async def hang(run: ScenarioRun) -> None:
    pid = run.page().pid
    trigger = asyncio.create_task(run.pull_trigger())
    await _check_detection(run, pid)
    await trigger


@scenario(DETECTED, options=SHORT_TIMEOUT, injects="spin@T,position=1,once")
async def spin(run: ScenarioRun) -> None:
    pid = run.page().pid
    trigger = asyncio.create_task(run.pull_trigger())
    await _check_detection(run, pid)
    await trigger


async def _check_detection(run: ScenarioRun, pid: int) -> None:
    """Check that the process of a hung core has ended at most one second after the timeout."""
    limit = run.engine.vllm_config.liveness_config.engine_iteration_timeout_s
    last_beat, process_has_ended = 0.0, has_ended(pid)

    async def has_ended_after_its_last_beat() -> bool:
        nonlocal last_beat
        if (page := run.page()).pid == pid:
            last_beat = time.monotonic() - page.heartbeat_age
        return await process_has_ended()

    await eventually(has_ended_after_its_last_beat, WAIT_S)
    detected_after = time.monotonic() - last_beat
    run.seen.append(f"ended {detected_after:.1f} s after its last heartbeat")
    run.check(detected_after < limit + 1, f"detected only after {detected_after:.1f} s; the timeout is {limit:g} s")


def has_ended(pid: int) -> Callable[[], Awaitable[bool]]:
    """Return a condition for `eventually`: the process has ended."""

    async def condition() -> bool:
        try:
            return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True

    return condition


@scenario(GOES_ON, injects="exit@T,position=1,once")
async def exit_in_step(run: ScenarioRun) -> None:
    await run.pull_trigger()


@scenario(GOES_ON, injects="raise@T,position=1,once")
async def raise_in_step(run: ScenarioRun) -> None:
    await run.pull_trigger()


@scenario(GOES_ON, injects="oom@T,position=1,once")
async def out_of_memory(run: ScenarioRun) -> None:
    await run.pull_trigger()


@scenario(GOES_ON, injects="exit@publish,T,position=1,messages=0,once")
async def exit_before_message(run: ScenarioRun) -> None:
    await run.pull_trigger()


@scenario(GOES_ON, injects="exit@publish,T,position=5,messages=0,once")
async def exit_before_last_message(run: ScenarioRun) -> None:
    """The core dies in the step that finished a request, before it tells any client."""
    await run.pull_trigger(max_tokens=6)


@scenario(GOES_ON, injects="exit@publish,T,position=5,messages=1,once")
async def exit_after_last_message(run: ScenarioRun) -> None:
    await run.pull_trigger(max_tokens=6)


@scenario(GOES_ON, injects="exit@publish,T,once")
async def exit_mid_message(run: ScenarioRun) -> None:
    """The core ends in the middle of a message that is larger than a socket's buffer."""
    params = greedy(4, prompt_logprobs=-1)
    got, again = [await answer(run.engine, "To be, or not to be", params, name) for name in (run.trigger, "plain")]
    difference = np.abs(_prompt_logprobs(got) - _prompt_logprobs(again)).max()
    run.check(
        got.outputs[0].token_ids == again.outputs[0].token_ids and bool(difference < ROUNDING),
        "the output with the large message is not the same when it is requested again",
    )


def _prompt_logprobs(output: RequestOutput) -> npt.NDArray[np.float64]:
    """Return the log-probability of every token at every position but the first, [num_prompt_tokens - 1, vocab]."""
    assert output.prompt_logprobs is not None
    entries = [entry for entry in output.prompt_logprobs[1:] if entry is not None]
    return np.array([[entry[token].logprob for token in sorted(entry)] for entry in entries])


@scenario(_NEXT_ATTEMPT, options={"fault_injection": "exit@load,incarnation=2"})
async def exit_while_loading(run: ScenarioRun) -> None:
    run.signal(signal.SIGKILL)


@scenario(_NEXT_ATTEMPT)
async def kill_while_loading(run: ScenarioRun) -> None:
    if (standby := run.engine.cores.first.supervisor.standby_pid) is not None:
        os.kill(standby, signal.SIGKILL)  # it would become the core at once
    known = core_children()
    run.signal(signal.SIGKILL)
    await eventually(has_new_child(known), WAIT_S)
    for child in core_children() - known:
        os.kill(child, signal.SIGKILL)


def has_new_child(known: set[int]) -> Callable[[], Awaitable[bool]]:
    """Return a condition for `eventually`: this process has a child that is not among the `known` ones."""

    async def condition() -> bool:
        return bool(core_children() - known)

    return condition


@scenario("the core goes on without its log", injects="fulldisk@T,position=1,once", restarts=0)
async def full_disk(run: ScenarioRun) -> None:
    """Every write to a file fails, while invalid frames give the core something to log."""
    await run.pull_trigger()
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(core_address(run.engine))
        for _ in range(64):
            stranger.send(b"not of the protocol")

    async def dropped() -> bool:
        return bool((await run.engine.core_status())["num_dropped_messages"] >= 64)

    await eventually(dropped, WAIT_S)


@scenario(GOES_ON, options={"max_core_restarts": 4})
async def full_tmpdir(run: ScenarioRun) -> None:
    """The next core finds no space for its files."""
    folder = Path(core_address(run.engine).removeprefix("ipc://")).parent
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k,mode=700", "tmpfs", str(folder)]
    mounting = await asyncio.create_subprocess_exec(*mount, stderr=subprocess.DEVNULL)
    if await mounting.wait():
        run.seen.append("with space in the folder: this user may mount no small disk")
    else:
        run.cleanup.callback(subprocess.run, ["umount", "--lazy", str(folder)], check=True)
        (folder / "filler").write_bytes(bytes(4096))
    run.signal(signal.SIGKILL)


@scenario(_UNDISTURBED, options=SHORT_TIMEOUT, injects="busy@T,seconds=0.5", restarts=0)
async def slow_core(run: ScenarioRun) -> None:
    await run.pull_trigger(max_tokens=10)


@scenario(_KILL_LATER)
async def socket_file_removed(run: ScenarioRun) -> None:
    os.unlink(core_address(run.engine).removeprefix("ipc://"))
    step = run.page().step
    await run.until(lambda page: page.step > step + 2)
    run.watch.strike()
    run.signal(signal.SIGKILL)


@scenario(_KILL_LATER)
async def runtime_folder_removed(run: ScenarioRun) -> None:
    shutil.rmtree(Path(core_address(run.engine).removeprefix("ipc://")).parent)
    step = run.page().step
    await run.until(lambda page: page.step > step + 2)
    run.watch.strike()
    run.signal(signal.SIGKILL)


@scenario(_UNDISTURBED, injects=f"clock@T,position=1,seconds=-{_DAY_S:g},once", restarts=0)
async def clock_jumps(run: ScenarioRun) -> None:
    """The time of day jumps by one day: backward in the core, forward in the client."""
    now = time.time

    def tomorrow() -> float:
        return now() + _DAY_S

    run.cleanup.enter_context(mock.patch("time.time", tomorrow))
    await run.pull_trigger()


@scenario(_CULPRIT_FAILS, injects="segv@T,position=0", restarts=None)
async def culprit(run: ScenarioRun) -> None:
    before = (await run.engine.core_status())["restarts"]
    num_requests = await run.engine.get_num_unfinished_requests() + 1
    await run.pull_fatal_trigger()
    restarts = (await run.engine.core_status())["restarts"] - before
    most = 3 + math.ceil(math.log2(num_requests))
    run.check(2 <= restarts <= most, f"the core was restarted {restarts} times; expected 2 to {most}")


@scenario(_CULPRIT_FAILS, injects="raise@T,position=0", restarts=None)
async def culprit_raises(run: ScenarioRun) -> None:
    await culprit(run)


@scenario(_CULPRIT_FAILS, injects="segv@T,position=3", restarts=None)
async def culprit_in_mid_answer(run: ScenarioRun) -> None:
    await culprit(run)


@scenario(_CULPRIT_FAILS, injects="segv@compile,about=fatal", restarts=None)
async def culprit_while_compiling(run: ScenarioRun) -> None:
    """The core dies when it compiles the constraint of a request, which is in no step."""
    num_requests = await run.engine.get_num_unfinished_requests() + 1
    before = (await run.engine.core_status())["restarts"]
    await run.pull_fatal_trigger(structured_outputs=StructuredOutputsParams(regex="fatal[0-9]"))
    restarts = (await run.engine.core_status())["restarts"] - before
    most = 3 + math.ceil(math.log2(num_requests))
    run.check(2 <= restarts <= most, f"the core was restarted {restarts} times; expected 2 to {most}")


_NUM_CONSTRAINED = 400
"""More streams with constraints of their own than constraints of a client may wait to be compiled."""


@scenario(GOES_ON, options={"max_num_seqs": 512})
async def constrained_streams(run: ScenarioRun) -> None:
    """The core gets SIGKILL while 400 more streams have constraints of their own."""

    def stream(number: int) -> AsyncIterator[RequestOutput]:
        form = StructuredOutputsParams(regex=rf"{number}:[a-z]{{200}}")
        params = SamplingParams(temperature=1.0, seed=1, max_tokens=60, structured_outputs=form)
        return run.engine.generate("Letters:", params)

    streams = [stream(number) for number in range(_NUM_CONSTRAINED)]
    for first in range(0, _NUM_CONSTRAINED, 100):  # beyond the limit, new requests are refused
        await asyncio.gather(*(anext(stream) for stream in streams[first : first + 100]))
    run.watch.strike()
    run.signal(signal.SIGKILL)
    for number, completion in enumerate(await asyncio.gather(*map(rest, streams))):
        run.check(
            completion.text.startswith(f"{number}:") and completion.finish_reason in ("stop", "length"),
            f"constrained stream {number} ended with {completion}",
        )
    run.seen.append(f"{_NUM_CONSTRAINED} constrained streams continued")


@scenario(
    "the request fails alone, without a restart",
    injects="nan@T,position=2",
    restarts=0,
)
async def nan(run: ScenarioRun) -> None:
    for params in ({}, {"logprobs": 2}, {"temperature": 1.0, "seed": 1}):
        await run.pull_fatal_trigger(**params)


@scenario(_UNDISTURBED, restarts=0)
async def client_blocked(run: ScenarioRun) -> None:
    time.sleep(run.baseline.block_s)  # noqa: ASYNC251 - the event loop must be blocked


@scenario(GOES_ON)
async def client_blocked_while_core_dies(run: ScenarioRun) -> None:
    run.signal(signal.SIGKILL)
    time.sleep(run.baseline.block_s)  # noqa: ASYNC251 - the event loop must be blocked


@scenario(
    _ALL_FAIL,
    options={
        "fault_injection": ";".join(f"exit@load,incarnation={number}" for number in (2, 3, 4)),
        "max_core_restarts": 3,
    },
    restarts=None,
    ends_all=True,
)
async def too_many_deaths(run: ScenarioRun) -> None:
    run.signal(signal.SIGKILL)


@scenario(_ALL_FAIL, options={"recovery": False}, restarts=None, ends_all=True)
async def no_recovery(run: ScenarioRun) -> None:
    run.signal(signal.SIGKILL)
