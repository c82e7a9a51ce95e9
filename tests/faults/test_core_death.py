"""Without recovery, everybody who waits for a core that dies learns the cause at once, and nothing hangs."""

import asyncio
import errno
import os
import signal
import time

import psutil
import pytest

from vllm_mp import EngineDeadError, EngineError, SamplingParams
from vllm_mp.testing.engines import answer, eventually, greedy


async def start_streams(engine, count):
    """`count` streams that have all begun."""
    streams = [engine.generate("Hello", SamplingParams(max_tokens=900, ignore_eos=True)) for _ in range(count)]
    await asyncio.gather(*(anext(stream) for stream in streams))
    return streams


async def drain(stream):
    async for _ in stream:
        pass


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGABRT])
def test_every_stream_and_call_fails_with_the_cause(make_engine, signum):
    engine = make_engine(recovery=False)

    async def run():
        streams = await start_streams(engine, 8)
        pid = (await engine.core_status())["pid"]
        os.kill(pid, signum)
        results = await asyncio.wait_for(
            asyncio.gather(*(drain(stream) for stream in streams), return_exceptions=True), 20
        )
        for result in results:
            assert isinstance(result, EngineDeadError)
            assert signal.Signals(signum).name in str(result)
        for later in (answer(engine, "Hello", greedy(3)), engine.check_health(), engine.core_status()):
            with pytest.raises(EngineDeadError, match=signal.Signals(signum).name):
                await later
        assert engine.errored
        assert engine.is_stopped
        assert isinstance(engine.dead_error, EngineDeadError)
        assert await engine.get_num_unfinished_requests() == 0
        return pid

    assert not psutil.pid_exists(asyncio.run(run()))


def test_the_death_is_noticed_where_the_system_has_no_process_descriptors(make_engine, monkeypatch):
    def refuse(pid):
        raise OSError(errno.ENOSYS, "not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    engine = make_engine(recovery=False)

    async def run():
        (stream,) = await start_streams(engine, 1)
        os.kill(engine._supervisor.core.process.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await asyncio.wait_for(drain(stream), 20)

    asyncio.run(run())


def test_the_error_carries_the_end_of_the_cores_log_and_says_where_it_is(make_engine):
    engine = make_engine(recovery=False)

    async def run():
        (stream,) = await start_streams(engine, 1)
        os.kill((await engine.core_status())["pid"], signal.SIGKILL)
        with pytest.raises(EngineDeadError) as caught:
            await drain(stream)
        return str(caught.value)

    message = asyncio.run(run())
    assert "ready after" in message
    assert str(engine._supervisor.core.process.log_path) in message
    assert engine._supervisor.core.process.log_path.exists()
    engine.shutdown()
    assert not engine._supervisor.core.process.log_path.parent.exists()


def test_a_death_between_two_loops_is_noticed_at_the_next_use(make_engine):
    engine = make_engine(recovery=False)
    assert asyncio.run(answer(engine, "Hello", greedy(2))).finished
    os.kill(engine._supervisor.core.process.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        asyncio.run(answer(engine, "Hello", greedy(2)))


def test_a_core_that_stands_still_is_found_out_in_bounded_time(make_engine, monkeypatch):
    monkeypatch.setattr("vllm_mp.client.engine.core_client._PING_TIMEOUT_S", 0.5)
    engine = make_engine(recovery=False)

    async def run():
        await engine.check_health()
        os.kill(engine._supervisor.core.process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(EngineError, match="not answered"):
                await engine.check_health()
        finally:
            os.kill(engine._supervisor.core.process.pid, signal.SIGCONT)
        await engine.check_health()

    asyncio.run(run())


def test_a_core_that_stands_still_for_too_long_is_ended(make_engine):
    engine = make_engine(recovery=False, engine_iteration_timeout_s=0.5)

    async def run():
        streams = await start_streams(engine, 2)
        os.kill(engine._supervisor.core.process.pid, signal.SIGSTOP)
        for stream in streams:
            with pytest.raises(EngineDeadError, match=r"no progress for 0\.5 s"):
                await asyncio.wait_for(drain(stream), 20)

    asyncio.run(run())
    assert not psutil.pid_exists(engine._supervisor.core.process.pid)


def test_health_is_answered_in_bounded_time_while_there_is_no_core(make_engine, monkeypatch):
    monkeypatch.setattr("vllm_mp.client.engine.core_client._PING_TIMEOUT_S", 0.05)
    engine = make_engine()

    async def run():
        await engine.core_status()
        os.kill(engine._supervisor.core.process.pid, signal.SIGKILL)

        async def says_so():
            try:
                await engine.check_health()
            except EngineError as error:
                return "its successor is not ready yet" in str(error)
            return False

        await eventually(says_so)
        assert not engine.errored

        async def is_well():
            try:
                await engine.check_health()
            except EngineError:
                return False
            return True

        await eventually(is_well)

    asyncio.run(run())


def test_a_stopped_core_can_still_be_shut_down(make_engine):
    engine = make_engine(recovery=False)
    os.kill(engine._supervisor.core.process.pid, signal.SIGSTOP)
    started = time.monotonic()
    engine.shutdown(timeout=0.5)
    assert not psutil.pid_exists(engine._supervisor.core.process.pid)
    assert time.monotonic() - started < 30


def test_the_status_page_outlives_the_core_and_names_the_step(make_engine):
    engine = make_engine(recovery=False)

    async def run():
        streams = await start_streams(engine, 3)
        page = engine._supervisor.core.process.status_page()

        async def in_a_step_of_three():
            return len(page.read().step_requests) == 3

        async def dead():
            return engine.errored

        await eventually(in_a_step_of_three)
        os.kill(engine._supervisor.core.process.pid, signal.SIGKILL)
        await eventually(dead)
        status = page.read()
        assert status.pid == engine._supervisor.core.process.pid
        assert status.incarnation == 1
        assert status.step > 1
        assert {slot for _, slot, _ in status.step_requests} <= {0, 1, 2}
        assert len(streams) == 3, "held until here, as streams that are dropped are aborted"

    asyncio.run(run())
