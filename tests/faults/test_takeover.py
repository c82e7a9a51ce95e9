"""`vllm-mp engine --takeover` takes a shared core over from another engine, with all streams of its clients."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from support.engine_fixtures import SLOW_STEPS
from support.recovering_requests import answers

from vllm_mp import AsyncEngineArgs, AsyncLLM
from vllm_mp.client.cores.process_activity import Activity, ProcessActivity
from vllm_mp.client.cores.sources.handover import ask_to_take_over
from vllm_mp.client.cores.sources.launcher import CoreLauncher
from vllm_mp.core_link.core_launch import status_path
from vllm_mp.core_link.core_status import CoreState
from vllm_mp.errors import EngineStartError
from vllm_mp.testing.engines import STANDALONE_CORE, eventually, make_keys, standalone_core

pytestmark = pytest.mark.usefixtures("forked_cores")

SLOW = ("--fault-injection", SLOW_STEPS)


def engine_command(model, address, *flags):
    command = [sys.executable, "-m", "vllm_mp.cli", "engine", "--listen", address, "--model", model]
    return [*command, *STANDALONE_CORE, *flags]


async def answers_until(is_over, client):
    """Return all answers to requests that are made again and again until `is_over()`."""
    found = []
    while not is_over():
        found.append(await answers(client))
    return found


@pytest.fixture
def served(small_model, tmp_path):
    """An engine, its address, and a client."""
    address = f"ipc://{tmp_path}/core.sock"
    with standalone_core(small_model, address, *SLOW) as old:
        client = AsyncLLM.connect(address, timeout=120)
        yield old, address, client
        client.shutdown()


def has_ended(process):
    return lambda: process.poll() is not None


def test_streams_go_on_and_the_old_engine_ends(served, small_model):
    old, address, client = served

    async def run():
        expected = await answers(client)
        before = await client.core_status()
        with standalone_core(small_model, address, *SLOW, "--takeover") as new:
            found = await answers_until(has_ended(old), client)
            assert all(each == expected for each in found)
            status = await client.core_status()
            assert status["pid"] != before["pid"]
            assert status["num_found_blocks"] > 0
            assert status["num_recomputed_tokens"] == 0
            assert old.returncode == 0
            assert f"process {new.pid} has taken over" in old.stderr.read()
            # The new engine keeps what the old one kept, and others may take over from it.
            os.kill(status["pid"], signal.SIGKILL)
            assert await answers(client) == expected
            with standalone_core(small_model, address, *SLOW, "--takeover"):
                assert all(each == expected for each in await answers_until(has_ended(new), client))
                assert new.returncode == 0
                assert await answers(client) == expected

    asyncio.run(run())


@pytest.mark.slow
def test_engine_at_a_tcp_address_is_taken_over(small_model, tmp_path):
    keys = make_keys(tmp_path)
    flags = (*SLOW, "--key-file", keys[0])
    with standalone_core(small_model, "tcp://127.0.0.1:29871", *flags) as old:
        client = AsyncLLM.connect("tcp://127.0.0.1:29871", key_file=keys[1])

        async def run():
            expected = await answers(client)
            with standalone_core(small_model, "tcp://127.0.0.1:29871", *flags, "--takeover"):
                assert all(each == expected for each in await answers_until(has_ended(old), client))
                assert await answers(client) == expected
                client.shutdown()

        asyncio.run(run())
        assert old.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--dtype", "bfloat16"), "dtype bfloat16 instead of float32: give the same options"),
        (("--max-model-len", "64"), "max_model_len 64 instead of 512"),
    ],
)
def test_engine_of_another_model_takes_nothing_over(served, small_model, flags, message):
    old, address, client = served

    async def run():
        expected = await answers(client)
        before = (await client.core_status())["pid"]
        command = engine_command(str(small_model), address, *SLOW, "--takeover", *flags)
        new = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
        assert new.returncode == 1
        assert message in new.stderr
        assert await answers(client) == expected
        assert (await client.core_status())["pid"] == before
        assert old.poll() is None

    asyncio.run(run())


@contextlib.contextmanager
def hasty_engine(model, address):
    """Run an engine that waits only a second for the core of an engine that takes over, and a client of it."""
    program = (
        "import sys; from vllm_mp.cli import main; from vllm_mp.client.cores.sources import handover; "
        "handover._TAKE_TIMEOUT_S = 1.0; sys.exit(main())"
    )
    command = engine_command(str(model), address, *SLOW)
    command[1 : command.index("engine")] = ["-c", program]
    old = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    client = AsyncLLM.connect(address, timeout=120)
    try:
        yield old, client
    finally:
        client.shutdown()
        old.terminate()
        old.communicate()


@contextlib.contextmanager
def new_core(model, address):
    """Let this process take over up to the last word; yield its launcher and its core, which is ready to serve."""
    args = AsyncEngineArgs(
        model=str(model), dtype="float32", max_model_len=512, kv_cache_memory_bytes=2**27, fault_injection=SLOW_STEPS
    )
    launcher = CoreLauncher(args.create_engine_config(), b"")
    core = None
    try:
        while (inheritance := ask_to_take_over(address)) is None:
            time.sleep(0.02)  # the engine is about to let other processes ask
        launcher.inherit_from(inheritance, None)
        launcher.take_over(no_check)
        launcher.begin()
        core = launcher.finish(no_check)
        yield launcher, core
    finally:
        launcher.close(None, core)


def no_check():
    """Let a wait go on."""


@pytest.mark.slow
def test_engine_that_was_not_ready_in_time_serves_no_client(small_model, tmp_path):
    address = f"ipc://{tmp_path}/core.sock"
    with hasty_engine(small_model, address) as (old, client):

        async def run():
            expected = await answers(client)
            before = (await client.core_status())["pid"]
            with new_core(small_model, address) as (launcher, core):
                # The old engine takes its core back, and serves old and new clients.
                assert await answers(client) == expected
                pid = (await client.core_status())["pid"]
                assert pid not in (before, core.process.pid)
                assert await asyncio.to_thread(pid_at, address) == pid
                with pytest.raises(EngineStartError, match="has taken its core back and goes on"):
                    launcher.confirm(core, no_check)
                assert not core.process.is_alive()
            assert await asyncio.to_thread(pid_at, address) == pid
            assert await answers(client) == expected
            assert old.poll() is None

        asyncio.run(run())


@pytest.mark.slow
def test_new_core_serves_no_client_while_the_old_engine_is_stopped(served, small_model):
    old, address, client = served
    page = status_path(Path(address.removeprefix("ipc://")))

    async def run():
        expected = await answers(client)
        with new_core(small_model, address) as (launcher, core):
            old.send_signal(signal.SIGSTOP)
            await eventually(lambda: all_threads_are_stopped(old.pid))
            running = asyncio.create_task(answers(client))
            looks = []

            def continue_at_fifth_look():
                looks.append(not page.exists() and core.page.read().state not in (CoreState.IDLE, CoreState.STEPPING))
                if len(looks) == 5:
                    old.send_signal(signal.SIGCONT)

            try:
                await asyncio.to_thread(launcher.confirm, core, continue_at_fifth_look)
            finally:
                old.send_signal(signal.SIGCONT)
            assert looks[:5] == [True] * 5
            assert await running == expected
            assert (await client.core_status())["pid"] == core.process.pid
            assert await asyncio.to_thread(old.wait) == 0

    asyncio.run(run())


async def all_threads_are_stopped(pid):
    return ProcessActivity(pid).look(0.0) is Activity.STOPPED


def pid_at(address):
    """Return the process id of the core that a new client finds."""
    client = AsyncLLM.connect(address, timeout=120)
    try:
        return asyncio.run(client.core_status())["pid"]
    finally:
        client.shutdown()


@pytest.mark.slow
def test_old_engine_goes_on_if_the_new_one_dies_while_it_loads(served, small_model):
    old, address, client = served

    async def run():
        expected = await answers(client)
        before = (await client.core_status())["pid"]
        for _ in range(2):
            with standalone_core(small_model, address, *SLOW, "--takeover") as new:
                await eventually(lambda: children_of(new.pid))
                cores = await children_of(new.pid)
                new.kill()
                new.wait()
            assert await answers(client) == expected
            await asyncio.to_thread(psutil.wait_procs, cores)
        assert (await client.core_status())["pid"] == before
        assert await asyncio.to_thread(pid_at, address) == before
        assert old.poll() is None
        with standalone_core(small_model, address, *SLOW, "--takeover"):
            await answers_until(has_ended(old), client)
            assert await answers(client) == expected

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_new_engine_starts_its_core_if_the_old_one_ends_meanwhile(served, small_model, number):
    old, address, client = served

    async def run():
        expected = await answers(client)
        with standalone_core(small_model, address, *SLOW, "--takeover") as new:
            await eventually(lambda: children_of(new.pid))
            running = asyncio.create_task(answers(client))
            old.send_signal(number)
            assert await running == expected
            assert await answers(client) == expected
            assert new.poll() is None
        assert not (await asyncio.to_thread(os.path.exists, address.removeprefix("ipc://")))

    asyncio.run(run())


async def children_of(pid):
    return psutil.Process(pid).children()


@pytest.mark.slow
def test_without_an_engine_it_starts_as_usual(small_model, tmp_path):
    address = f"ipc://{tmp_path}/core.sock"
    with standalone_core(small_model, address, "--takeover"):
        client = AsyncLLM.connect(address, timeout=120)
        try:
            assert asyncio.run(answers(client))
        finally:
            client.shutdown()
