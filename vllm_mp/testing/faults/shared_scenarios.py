"""Scenarios of a core that other clients share, and of two engines on one machine; with these, all are registered."""

import asyncio
import copy
import os
import signal
import sys
import time

from vllm_mp import AsyncLLM
from vllm_mp.testing.engines import answer, eventually, greedy
from vllm_mp.testing.faults.baseline import COMMON_OPTIONS, WAIT_S, core_address, core_page
from vllm_mp.testing.faults.comparison import Comparison
from vllm_mp.testing.faults.load import outcomes_of
from vllm_mp.testing.faults.playing import ScenarioRun
from vllm_mp.testing.faults.scenarios import DETECTED, GOES_ON, SCENARIOS, SHORT_TIMEOUT, scenario

__all__ = ["SCENARIOS"]

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


async def _other_client(run: ScenarioRun) -> asyncio.subprocess.Process:
    """Start another client of the core, and return its process when it has streams."""
    other = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _OTHER_CLIENT, core_address(run.engine), stdout=asyncio.subprocess.PIPE
    )
    assert other.stdout is not None
    await other.stdout.readline()
    return other


async def _own_requests_alone_are_left(run: ScenarioRun) -> None:
    """Return when the core holds no requests but those of the engine of `run`."""

    async def condition() -> bool:
        status = await run.engine.core_status()
        return bool(status["num_running"] + status["num_waiting"] <= run.engine.output_processor.num_slots_in_use)

    await eventually(condition, WAIT_S)


@scenario("its requests are dropped within 2 s, other clients are undisturbed", restarts=0, stands_alone=True)
async def client_killed(run: ScenarioRun) -> None:
    other = await _other_client(run)
    other.kill()
    killed = time.monotonic()
    await other.wait()
    await _own_requests_alone_are_left(run)
    seconds = time.monotonic() - killed
    run.seen.append(f"dropped after {seconds:.2f} s")
    run.check(seconds < 2, f"the killed client's requests were dropped only after {seconds:.1f} s")


@scenario("its requests are gone, those of other clients as in kill", stands_alone=True)
async def client_killed_with_core(run: ScenarioRun) -> None:
    other = await _other_client(run)
    incarnation = run.page().incarnation
    run.watch.strike()
    other.kill()
    run.signal(signal.SIGKILL)
    await other.wait()
    await run.until(lambda page: page.incarnation > incarnation)
    await _own_requests_alone_are_left(run)
    num_clients = (await run.engine.core_status())["num_clients"]
    run.check(num_clients == 1, f"the next core has {num_clients} clients; expected 1")


@scenario("each engine goes on as after kill, with its own KV cache")
async def two_engines(run: ScenarioRun) -> None:
    """The cores of two engines of the same model die at the same time."""
    baseline = run.baseline
    engine_of_its_own = baseline.engine(**COMMON_OPTIONS, fault_injection=baseline.pace)
    other = await asyncio.to_thread(run.cleanup.enter_context, engine_of_its_own)
    engines = (run.engine, other)
    # Request ids are made of the identity of a case, and those of the scenario may still run.
    copies = [[copy.copy(case) for case in baseline.cases] for _ in engines]
    streams = [asyncio.create_task(outcomes_of(*each)) for each in zip(engines, copies, strict=True)]
    before = [page.step for engine in engines if (page := core_page(engine)) is not None]

    async def have_begun() -> bool:
        pages = [core_page(engine) for engine in engines]
        return all(page is not None and page.step > step + 4 for page, step in zip(pages, before, strict=True))

    await eventually(have_begun, WAIT_S)
    run.watch.strike()
    for engine in engines:
        page = core_page(engine)
        assert page is not None
        os.kill(page.pid, signal.SIGKILL)
    comparison = Comparison()
    for outcomes in await asyncio.gather(*streams):
        for case, got, expected in zip(baseline.cases, outcomes, baseline.expected, strict=True):
            comparison.compare(case, got, expected)
    run.broken += comparison.settle(baseline.folder, baseline.eos_token_ids)
    status = await other.core_status()
    run.check(
        status["restarts"] == 1 and status["num_found_blocks"] > 0,
        f"the other core was restarted {status['restarts']} times and found {status['num_found_blocks']} blocks",
    )


_CROWD = """
import sys
import zmq
from vllm_mp import wire
from vllm_mp.machine.descriptor_limit import raise_descriptor_limit
raise_descriptor_limit()
context = zmq.Context()
context.set(zmq.MAX_SOCKETS, 8192)
clients = []
for _ in range(4200):
    client = context.socket(zmq.DEALER)
    client.linger = 0
    client.connect(sys.argv[1])
    client.send(wire.encode(wire.hello()))
    clients.append(client)
for client in clients:
    client.recv()
print("connected", flush=True)
sys.stdin.read()
"""


@scenario("other processes find places, and other clients are undisturbed", restarts=0, stands_alone=True)
async def client_crowd(run: ScenarioRun) -> None:
    """Another process opens as many clients as it can."""
    crowd = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _CROWD, core_address(run.engine)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert crowd.stdout is not None
        run.check(await crowd.stdout.readline() == b"connected\n", "the other process could not connect")
        num_clients = (await run.engine.core_status())["num_clients"]
        run.seen.append(f"{num_clients} clients")
        run.check(num_clients > 3000, f"the other process has only {num_clients} clients")
        engine = await asyncio.to_thread(AsyncLLM.connect, core_address(run.engine), timeout=WAIT_S)
        try:
            await answer(engine, "Hello", greedy(4))
        finally:
            await engine.aclose()
    finally:
        crowd.kill()
        await crowd.wait()


@scenario(GOES_ON, stands_alone=True)
async def shared_core_killed(run: ScenarioRun) -> None:
    run.signal(signal.SIGKILL)


@scenario(DETECTED, options=SHORT_TIMEOUT, stands_alone=True)
async def shared_core_stopped(run: ScenarioRun) -> None:
    run.signal(signal.SIGSTOP)


@scenario("connected clients find the new core and go on", restarts=0, stands_alone=True)
async def core_restarted_by_hand(run: ScenarioRun) -> None:
    assert run.core is not None
    run.core.kill()
    run.core.wait()
    run.cleanup.enter_context(run.baseline.core(core_address(run.engine)))
