"""A core is replaced by a new process under load: streams go on, nothing is computed again, and no restart counts."""

import asyncio
import functools
import os
import signal

import psutil
import pytest
from support.engine_fixtures import SLOW_STEPS
from support.recovering_requests import answers

from vllm_mp import AsyncLLM
from vllm_mp.client.cores.sources.template import CoreTemplate
from vllm_mp.core_link.core_launch import CoreLaunch
from vllm_mp.errors import EngineDeadError, EngineStartError
from vllm_mp.machine.loading_thread import BESIDE_A_CORE
from vllm_mp.testing.engines import eventually, running_engine, standalone_core
from vllm_mp.wire import PROTOCOL_VERSION

pytestmark = pytest.mark.usefixtures("forked_cores")

OPTIONS = {"fault_injection": SLOW_STEPS, "max_core_restarts": 0, "max_num_batched_tokens": 64}


def supervisor_of(engine):
    return engine.cores.first.supervisor


async def standby_of(engine):
    """Return the process id of the process that is to replace the core, once it exists."""
    supervisor = supervisor_of(engine)

    async def is_there():
        return supervisor.standby_pid is not None

    await eventually(is_there)
    return supervisor.standby_pid


async def answers_while(work, engine):
    """Return the result of `work`, and all answers to requests that are made again and again meanwhile."""
    working = asyncio.ensure_future(work)
    found = []
    while not working.done():
        found.append(await answers(engine))
    return await working, found


@pytest.fixture(scope="module")
def engine(small_model):
    with running_engine(small_model, **OPTIONS) as engine:
        yield engine


def test_streams_go_on_and_nothing_is_computed_again(engine):
    async def run():
        expected = await answers(engine)
        before = (await engine.core_status())["pid"]
        _, found = await answers_while(engine.restart_core(), engine)
        assert all(each == expected for each in found)
        status = await engine.core_status()
        assert status["num_found_blocks"] > 0
        assert status["num_recomputed_tokens"] == 0
        assert status["pid"] != before
        assert status["last_death"] == f"the core process {before} is replaced"

    asyncio.run(run())


def test_calls_at_one_time_get_one_new_core(engine):
    async def run():
        before = (await engine.core_status())["incarnation"]
        await asyncio.gather(*(engine.restart_core() for _ in range(3)))
        assert (await engine.core_status())["incarnation"] == before + 1

    asyncio.run(run())


def test_core_goes_on_if_the_new_process_does_not_start(engine, monkeypatch):
    async def run():
        expected = await answers(engine)
        before = (await engine.core_status())["pid"]
        with monkeypatch.context() as patch:
            patch.setenv("PYTHONHOME", "/nonexistent")
            with pytest.raises(EngineStartError, match="that was to replace the core did not start"):
                await engine.restart_core()
        assert await answers(engine) == expected
        assert (await engine.core_status())["pid"] == before
        assert supervisor_of(engine).standby_pid is None
        await engine.restart_core()

    asyncio.run(run())


def test_new_process_that_dies_while_it_loads_costs_nothing(engine):
    async def run():
        restarting = asyncio.ensure_future(engine.restart_core())
        pid = await standby_of(engine)

        async def leaves_processors_to_the_core():
            threads = map(int, os.listdir(f"/proc/{pid}/task"))
            niceness = min(19, os.getpriority(os.PRIO_PROCESS, 0) + BESIDE_A_CORE)
            return any(os.getpriority(os.PRIO_PROCESS, thread) == niceness for thread in threads)

        await eventually(leaves_processors_to_the_core)
        before = (await engine.core_status())["pid"]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineStartError, match="SIGKILL"):
            await restarting
        assert (await engine.core_status())["pid"] == before

    asyncio.run(run())


def test_core_that_dies_meanwhile_is_replaced_by_the_process_that_loads(small_model):
    with running_engine(small_model, **{**OPTIONS, "max_core_restarts": 1}) as engine:

        async def strike():
            restarting = asyncio.ensure_future(engine.restart_core())
            pid = await standby_of(engine)
            supervisor_of(engine).core.process.send_signal(signal.SIGKILL)
            await restarting
            return pid

        async def run():
            expected = await answers(engine)
            pid, found = await answers_while(strike(), engine)
            assert all(each == expected for each in found)
            assert (await engine.core_status())["pid"] == pid

        asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"data_parallel_size": 2}],
    ids=lambda options: " ".join(options),
)
def test_core_is_replaced_with(small_model, options):
    with running_engine(small_model, **{**OPTIONS, **options}) as engine:

        async def run():
            expected = await answers(engine)
            _, found = await answers_while(engine.restart_core(), engine)
            assert all(each == expected for each in found)
            assert [client.incarnation for client in engine.cores.clients] == [2] * len(engine.cores.clients)
            if "data_parallel_size" not in options:
                assert (await engine.core_status())["num_recomputed_tokens"] == 0

        asyncio.run(run())


def test_shutdown_ends_a_replacement(small_model):
    with running_engine(small_model, **OPTIONS) as engine:

        async def run():
            restarting = asyncio.ensure_future(engine.restart_core())
            pid = await standby_of(engine)
            engine.shutdown()
            with pytest.raises(EngineDeadError, match="shut down"):
                await restarting
            return pid

        assert not psutil.pid_exists(asyncio.run(run()))


def test_only_the_process_that_starts_the_core_replaces_it(small_model, tmp_path):
    address = f"ipc://{tmp_path}/core.sock"
    with standalone_core(small_model, address):
        client = AsyncLLM.connect(address, timeout=120)
        try:
            with pytest.raises(ValueError, match=f"has not started the core at {address}"):
                asyncio.run(client.restart_core())
        finally:
            client.shutdown()


def test_engine_without_recovery_replaces_no_core(small_model):
    with running_engine(small_model, recovery=False) as engine, pytest.raises(ValueError, match="recovery=False"):
        asyncio.run(engine.restart_core())


def test_package_with_other_messages_replaces_no_core(engine, monkeypatch):
    other = functools.partial(CoreLaunch, protocol=(PROTOCOL_VERSION, "other messages"))
    monkeypatch.setattr("vllm_mp.client.cores.sources.process.CoreLaunch", other)

    async def run():
        with pytest.raises(EngineStartError, match="restart that process too"):
            await engine.restart_core()
        assert await answers(engine)

    asyncio.run(run())


def test_later_cores_are_forked_from_a_template_that_is_as_new_as_the_core(small_model, monkeypatch):
    own = CoreTemplate()
    monkeypatch.setattr("vllm_mp.client.cores.sources.launcher.TEMPLATE", own)

    async def is_ready():
        return own.prepare() and own.pid is not None

    with running_engine(small_model, **OPTIONS) as engine:

        async def run():
            await eventually(is_ready)
            before = own.pid
            await engine.restart_core()
            await eventually(is_ready)
            assert own.pid != before

        asyncio.run(run())
