"""A rank that dies, hangs or says what no rank says is a death of its core: all ranks are replaced, streams go on."""

import asyncio
import contextlib
import os
import signal
import threading

import psutil
import pytest
from support.rank_streams import PROMPTS, ended, expected_tokens, rank_pids, streamed, tokens_after

from vllm_mp import EngineDeadError, EngineError
from vllm_mp.testing.engines import answer, eventually, greedy

pytestmark = pytest.mark.usefixtures("forked_ranks")

OPTIONS = {"num_threads": 1, "max_model_len": 256}
RANKS = {"tensor_parallel_size": 2, **OPTIONS}
PIPELINE = {"pipeline_parallel_size": 2, **OPTIONS}
STAGES = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, **OPTIONS}
"""Ranks 0 and 1 are the first stage, ranks 2 and 3 the second."""


async def assert_idle(pids):
    """Raise AssertionError unless there is a second in which the processes use hardly any processor time.

    On a busy machine, what they do after an answer may take several.
    """

    async def are_idle():
        before = [psutil.Process(pid).cpu_times() for pid in pids]
        await asyncio.sleep(1.0)
        after = [psutil.Process(pid).cpu_times() for pid in pids]
        return max(sum(new[:2]) - sum(old[:2]) for new, old in zip(after, before, strict=True)) < 0.3

    await eventually(are_idle)


@pytest.mark.parametrize(
    ("ranks", "last"),
    [(RANKS, 1), (PIPELINE, 1), pytest.param(STAGES, 3, marks=pytest.mark.slow)],
    ids=["tensor", "pipeline", "stages"],
)
def test_streams_continue_after_the_last_rank_is_killed_and_no_rank_outlives_its_core(ranks, last, make_small_engine):
    engine = make_small_engine(**ranks)

    async def run():
        expected = await expected_tokens(engine)
        first = await rank_pids(engine)
        assert len(first) == last + 1
        await assert_idle(first)
        assert await tokens_after(engine, lambda pids: os.kill(pids[last], signal.SIGKILL)) == expected
        second = await rank_pids(engine)
        assert not set(first) & set(second)
        os.kill(second[last], signal.SIGSTOP)  # a stopped process cannot end by itself
        os.kill(second[0], signal.SIGKILL)

        async def none_is_left():
            return ended([*first, *second])

        await eventually(none_is_left)

    asyncio.run(run())


def test_request_is_not_to_blame_for_kills_of_a_rank_in_each_step_that_it_is_in(make_small_engine):
    engine = make_small_engine(**RANKS, fault_injection="slow@step=*,seconds=0.5")

    async def run():
        supervisor = engine.cores.first.supervisor
        expected = (await answer(engine, PROMPTS[0], greedy(2))).outputs[0].token_ids
        stream = asyncio.ensure_future(answer(engine, PROMPTS[0], greedy(2)))
        for num_restarts in range(2):

            async def is_in_step(num_restarts=num_restarts):
                await asyncio.sleep(0.01)
                return supervisor.num_restarts == num_restarts and supervisor.status().step_requests

            await eventually(is_in_step)
            [rank] = psutil.Process(supervisor.core.process.pid).children()
            rank.kill()
        assert (await stream).outputs[0].token_ids == expected

    asyncio.run(run())


def test_call_that_a_rank_does_not_answer_is_answered_by_the_next_core(make_small_engine):
    engine = make_small_engine(**RANKS)

    async def run():
        first = await rank_pids(engine)
        os.kill(first[1], signal.SIGSTOP)
        call = asyncio.ensure_future(engine.collective_rpc("get_num_parameters"))
        pages = engine.cores.first.supervisor.core.page

        async def is_waiting():
            return pages.read().heartbeat_age > 1.0

        await eventually(is_waiting)
        os.kill(first[1], signal.SIGKILL)
        assert len(set(await call)) == 1
        assert not set(first) & set(await rank_pids(engine))

    asyncio.run(run())


@contextlib.contextmanager
def slowed_a_hundredfold(pid, cycle_s):
    """Let a process run for a hundredth of each `cycle_s` seconds."""
    process, is_over = os.pidfd_open(pid), threading.Event()

    def slow():
        with contextlib.suppress(ProcessLookupError):
            while not is_over.is_set():
                signal.pidfd_send_signal(process, signal.SIGSTOP)
                is_over.wait(0.99 * cycle_s)
                signal.pidfd_send_signal(process, signal.SIGCONT)
                is_over.wait(0.01 * cycle_s)

    thread = threading.Thread(target=slow)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        os.close(process)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "struck"), [(RANKS, [1]), (STAGES, [2, 3])], ids=["tensor", "stages"])
def test_streams_complete_though_a_rank_is_slowed_a_hundredfold(ranks, struck, make_small_engine):
    """The core goes on slowly, and is replaced once the rank makes no progress for too long."""
    engine = make_small_engine(**ranks, engine_iteration_timeout_s=1.0, start_timeout_s=30.0)

    async def run():
        expected = await expected_tokens(engine)
        for rank, cycle_s in [*((rank, 0.1) for rank in struck), (struck[-1], 4.0)]:
            first = await rank_pids(engine)
            with contextlib.ExitStack() as stack:

                def slow(pids, stack=stack, rank=rank, cycle_s=cycle_s):
                    stack.enter_context(slowed_a_hundredfold(pids[rank], cycle_s))

                assert await tokens_after(engine, slow) == expected
        assert not set(first) & set(await rank_pids(engine))

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "struck", "place"), [(RANKS, [1], ""), (STAGES, [2, 3], "stage 1, ")], ids=["tensor", "stages"]
)
def test_rank_that_is_stopped_or_dies_in_an_idle_core_is_replaced(ranks, struck, place, make_small_engine):
    engine = make_small_engine(**ranks, engine_iteration_timeout_s=3.0, start_timeout_s=30.0)

    async def run():
        expected = await expected_tokens(engine)
        pids = []
        for rank in struck:
            before = await rank_pids(engine)
            log = engine.cores.first.supervisor.core.process.log_path
            assert await tokens_after(engine, lambda pids, rank=rank: os.kill(pids[rank], signal.SIGSTOP)) == expected
            assert f"rank {rank} ({place}process {before[rank]}) has made no progress" in log.read_text()
            pids += before
        idle = await rank_pids(engine)
        os.kill(idle[struck[-1]], signal.SIGKILL)

        async def replaced():
            with contextlib.suppress(EngineError):  # no answer in time: the next core is starting
                return await rank_pids(engine) != idle

        await eventually(replaced)
        assert await tokens_after(engine, lambda pids: None) == expected
        return [*pids, *idle, *await rank_pids(engine)]

    pids = asyncio.run(run())
    engine.shutdown()
    assert ended(pids)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "rank", "place"), [(RANKS, 1, ""), (STAGES, 2, "stage 1, ")], ids=["tensor", "stages"]
)
def test_error_names_the_rank_that_died(ranks, rank, place, make_small_engine):
    engine = make_small_engine(**ranks, recovery=False)

    async def run():
        pids = await rank_pids(engine)
        stream = asyncio.ensure_future(streamed(engine, "Hello", begun := asyncio.Event()))
        await begun.wait()
        os.kill(pids[rank], signal.SIGKILL)
        cause = rf"rank {rank} \({place}process {pids[rank]}\) ended with signal SIGKILL"
        with pytest.raises(EngineDeadError, match=cause):
            await asyncio.wait_for(stream, 60)
        return pids

    assert ended(asyncio.run(run()))
