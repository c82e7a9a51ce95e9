"""A request that kills cores fails alone, and soon; signals from outside blame no request."""

import asyncio
import math
import os
import signal

import pytest

from vllm_mp import EngineGenerateError
from vllm_mp.testing.engines import answer, eventually, greedy, num_waiting_is

pytestmark = pytest.mark.usefixtures("forked_cores")

POISON = "poison@"


async def outcome(engine, request_id, prompt, max_tokens=6):
    """Return the number of tokens of a request, or the error with which it failed."""
    try:
        output = await answer(engine, prompt, greedy(max_tokens, ignore_eos=True), request_id)
    except EngineGenerateError as error:
        return error
    return len(output.outputs[0].token_ids)


def play(engine, num_innocents, num_copies):
    """Run innocent requests beside copies of a request that kills cores; check that only the copies fail.

    Return the number of deaths. All requests are in the first step.
    """

    async def run():
        await engine.pause_generation(mode="keep")
        innocents = [
            asyncio.create_task(outcome(engine, f"innocent-{i}", f"Number {i} is")) for i in range(num_innocents)
        ]
        copies = [asyncio.create_task(outcome(engine, f"{POISON}{i}", "The culprit says")) for i in range(num_copies)]
        await eventually(num_waiting_is(engine, num_innocents + num_copies))
        await engine.resume_generation()
        assert await asyncio.gather(*innocents) == [6] * num_innocents
        failures = await asyncio.gather(*copies)
        assert all(isinstance(failure, EngineGenerateError) for failure in failures)
        assert sum("alone in the last" in str(failure) for failure in failures) == num_copies
        status = await engine.core_status()
        later = await outcome(engine, f"{POISON}later", "The culprit says")
        assert "is refused: it is equal to request" in str(later)
        assert (await engine.core_status())["restarts"] == status["restarts"], "the refused request costs no death"
        return status["restarts"]

    return asyncio.run(run())


@pytest.mark.slow
def test_copies_of_a_culprit_fail_together_and_do_not_end_the_engine(make_small_engine):
    engine = make_small_engine(fault_injection=f"exit@request={POISON}")
    assert play(engine, num_innocents=3, num_copies=6) <= 3 + math.ceil(math.log2(9))
    assert not engine.cores.first.supervisor._restarts._deaths, "the deaths of the search are forgiven"


@pytest.mark.slow
def test_culprit_among_32_streams_fails_after_few_deaths(make_small_engine):
    engine = make_small_engine(fault_injection=f"segv@request={POISON},position=2")
    assert play(engine, num_innocents=31, num_copies=1) <= 3 + math.ceil(math.log2(32))


def test_pause_that_waits_for_requests_does_not_hide_which_of_them_kills_cores(make_small_engine):
    engine = make_small_engine(fault_injection=f"slow@step=*,seconds=0.05;exit@request={POISON},position=20")

    async def run():
        innocent = asyncio.create_task(outcome(engine, "innocent", "Number 1 is", 60))
        culprit = asyncio.create_task(outcome(engine, f"{POISON}1", "The culprit says", 60))

        async def both_run():
            return (await engine.core_status())["num_running"] == 2

        await eventually(both_run)
        await engine.pause_generation(mode="wait")
        assert (await innocent, "alone in the last" in str(await culprit)) == (60, True)
        assert (await engine.core_status())["restarts"] <= 3

    asyncio.run(run())


@pytest.mark.parametrize(
    "signum",
    [*(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGTERM, signal.SIGHUP)), signal.SIGSEGV],
    ids=["SIGTERM", "SIGHUP", "SIGSEGV"],
)
def test_signals_that_other_processes_send_blame_no_request(make_small_engine, signum):
    if signum == signal.SIGSEGV:
        pytest.importorskip("vllm_mp.core._signal_sender", reason="the signal handler is not compiled")
    # On a busy machine the streams must not end before the second death.
    engine = make_small_engine(fault_injection="slow@step=*,seconds=0.3")
    deaths = []
    record = engine.cores.first._suspects.record
    engine.cores.first._suspects.record = lambda death, live: deaths.append(death) or record(death, live)

    async def run():
        tasks = [asyncio.create_task(outcome(engine, name, name, 24)) for name in ("one", "two")]
        incarnation = 0
        for _ in range(2):

            async def is_in_a_step(previous=incarnation):
                assert not any(task.done() for task in tasks), "the requests have ended too early"
                status = engine.cores.first.supervisor.status()
                return status is not None and status.incarnation > previous and bool(status.step_requests)

            await eventually(is_in_a_step)
            incarnation = engine.cores.first.supervisor.status().incarnation
            os.kill(engine.cores.first.supervisor.core.process.pid, signum)
        assert await asyncio.gather(*tasks) == [24, 24]

    asyncio.run(run())
    assert [death.is_from_outside for death in deaths] == [True] * 2
