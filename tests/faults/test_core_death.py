"""Without recovery, every stream and call fails with the cause when the core dies, and nothing hangs."""

import asyncio
import errno
import os
import signal
import threading
import time

import psutil
import pytest
from support.covering import extended

from vllm_mp import EngineDeadError, EngineError, SamplingParams
from vllm_mp.client.cores.sources.launcher import CoreLauncher
from vllm_mp.testing.engines import answer, eventually, greedy

pytestmark = pytest.mark.usefixtures("forked_cores")


async def start_streams(engine, count):
    """Return `count` streams that have all begun."""
    streams = [engine.generate("Hello", SamplingParams(max_tokens=900, ignore_eos=True)) for _ in range(count)]
    await asyncio.gather(*(anext(stream) for stream in streams))
    return streams


async def drain(stream):
    async for _ in stream:
        pass


@pytest.mark.essential
@pytest.mark.parametrize(
    "signum",
    [signal.SIGKILL, signal.SIGSEGV, *extended(signal.SIGTERM, signal.SIGABRT)],
    ids=lambda signum: signum.name,
)
def test_every_stream_and_call_fails_with_the_cause(make_small_engine, signum):
    engine = make_small_engine(recovery=False)

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
        with pytest.raises(EngineDeadError, match=signal.Signals(signum).name):
            engine.start_background_loop()
        assert engine.errored
        assert engine.is_stopped
        assert isinstance(engine.dead_error, EngineDeadError)
        assert await engine.get_num_unfinished_requests() == 0
        return pid

    assert not psutil.pid_exists(asyncio.run(run()))


def test_death_is_noticed_on_a_system_without_pidfd_open(make_small_engine, monkeypatch):
    def refuse(pid):
        raise OSError(errno.ENOSYS, "not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    engine = make_small_engine(recovery=False)

    async def run():
        (stream,) = await start_streams(engine, 1)
        os.kill(engine.cores.first.supervisor.core.process.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await asyncio.wait_for(drain(stream), 60)

    asyncio.run(run())


def test_error_contains_the_end_of_the_log_and_its_path(make_small_engine):
    engine = make_small_engine(recovery=False, fault_injection="")  # each fault is a line of the log

    async def run():
        (stream,) = await start_streams(engine, 1)
        os.kill((await engine.core_status())["pid"], signal.SIGKILL)
        with pytest.raises(EngineDeadError) as caught:
            await drain(stream)
        return str(caught.value)

    message = asyncio.run(run())
    assert "ready after" in message
    assert str(engine.cores.first.supervisor.core.process.log_path) in message
    assert engine.cores.first.supervisor.core.process.log_path.exists()
    engine.shutdown()
    assert not engine.cores.first.supervisor.core.process.log_path.parent.exists()


def test_death_between_two_event_loops_fails_the_next_request(make_small_engine):
    engine = make_small_engine(recovery=False)
    assert asyncio.run(answer(engine, "Hello", greedy(2))).finished
    os.kill(engine.cores.first.supervisor.core.process.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        asyncio.run(answer(engine, "Hello", greedy(2)))


def test_health_check_of_a_stopped_core_fails_in_bounded_time(make_small_engine, monkeypatch):
    engine = make_small_engine(recovery=False)

    async def run():
        await engine.check_health()
        os.kill(engine.cores.first.supervisor.core.process.pid, signal.SIGSTOP)
        try:
            with monkeypatch.context() as patch:
                patch.setattr("vllm_mp.client.cores.core_group._PING_TIMEOUT_S", 0.5)
                with pytest.raises(EngineError, match="not answered"):
                    await engine.check_health()
        finally:
            os.kill(engine.cores.first.supervisor.core.process.pid, signal.SIGCONT)
        await engine.check_health()

    asyncio.run(run())


def test_core_without_progress_is_ended_after_the_timeout(make_small_engine):
    engine = make_small_engine(recovery=False, engine_iteration_timeout_s=1.5)

    async def run():
        streams = await start_streams(engine, 2)
        os.kill(engine.cores.first.supervisor.core.process.pid, signal.SIGSTOP)
        for stream in streams:
            with pytest.raises(EngineDeadError, match=r"no progress for [0-9.]+ s"):
                await asyncio.wait_for(drain(stream), 60)

    asyncio.run(run())
    assert not psutil.pid_exists(engine.cores.first.supervisor.core.process.pid)


def test_health_check_fails_in_bounded_time_while_the_core_restarts(make_small_engine, monkeypatch):
    monkeypatch.setattr("vllm_mp.client.cores.core_group._PING_TIMEOUT_S", 0.05)
    engine = make_small_engine()
    begin, may_begin = CoreLauncher.begin, threading.Event()
    monkeypatch.setattr(CoreLauncher, "begin", lambda launcher: may_begin.wait(60) and begin(launcher))

    async def run():
        await engine.core_status()
        os.kill(engine.cores.first.supervisor.core.process.pid, signal.SIGKILL)

        async def next_core_is_awaited():
            try:
                await engine.check_health()
            except EngineError as error:
                return "its successor is not ready yet" in str(error)
            return False

        await eventually(next_core_is_awaited)
        assert not engine.errored
        may_begin.set()

        async def is_healthy():
            try:
                await engine.check_health()
            except EngineError:
                return False
            return True

        await eventually(is_healthy)

    asyncio.run(run())


def test_stopped_core_can_be_shut_down(make_small_engine):
    engine = make_small_engine(recovery=False)
    os.kill(engine.cores.first.supervisor.core.process.pid, signal.SIGSTOP)
    started = time.monotonic()
    engine.shutdown(timeout=0.5)
    assert not psutil.pid_exists(engine.cores.first.supervisor.core.process.pid)
    assert time.monotonic() - started < 30


def test_status_page_outlives_the_core_and_names_the_requests_of_the_step(make_small_engine):
    engine = make_small_engine(recovery=False)

    async def run():
        streams = await start_streams(engine, 3)
        page = engine.cores.first.supervisor.core.process.status_page()

        async def is_in_a_step_of_three():
            return len(page.read().step_requests) == 3

        async def is_dead():
            return engine.errored

        await eventually(is_in_a_step_of_three)
        os.kill(engine.cores.first.supervisor.core.process.pid, signal.SIGKILL)
        await eventually(is_dead)
        status = page.read()
        assert status.pid == engine.cores.first.supervisor.core.process.pid
        assert status.incarnation == 1
        assert status.step > 1
        assert {slot for _, slot, _ in status.step_requests} <= {0, 1, 2}
        assert len(streams) == 3, "the streams are referenced until here, because unreferenced streams are aborted"

    asyncio.run(run())
