"""The parent of a shared core: it replaces the core at the same address, and ends with all that it has made."""

import asyncio
import contextlib
import os
import signal
import time

import psutil
import pytest
from support.forked_cores import HELPER_NAMES

from vllm_mp import AsyncLLM, EngineError
from vllm_mp.client.cores import supervisor
from vllm_mp.client.cores.process_activity import is_stopped
from vllm_mp.core_link.core_launch import status_path
from vllm_mp.testing.engines import answer, eventually, greedy, make_keys, standalone_core
from vllm_mp.testing.random_models import CONFIGS, save_random_model

pytestmark = pytest.mark.usefixtures("forked_programs")

PROMPTS = [{"prompt_token_ids": list(range(first, first + 20))} for first in (20, 40)]
FLAGS = (
    *("--skip-tokenizer-init", "--max-model-len", "128", "--kv-cache-memory-bytes", str(2**22), "--num-threads", "1"),
    *("--engine-iteration-timeout-s", "2", "--fault-injection", "slow@step=*,seconds=0.02"),
)
"""Flags of a core whose streams last long enough for a fault."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_random_model(CONFIGS["llama"], path)
    return path


@pytest.fixture(scope="module", params=["ipc", pytest.param("tcp", marks=pytest.mark.slow)])
def parent(request, model, tmp_path_factory):
    """A parent, the arguments with which clients connect to its core, and the folder of all its files."""
    folder = tmp_path_factory.mktemp(request.param)
    arguments = {"address": f"ipc://{folder}/core.sock"}
    flags = FLAGS
    if request.param == "tcp":
        server_key, client_key = make_keys(tmp_path_factory.mktemp("keys"))
        arguments = {"address": "tcp://127.0.0.1:0", "key_file": client_key}
        flags = (*FLAGS, "--key-file", server_key)
    with (
        (folder / "log").open("w+b") as log,
        standalone_core(model, arguments["address"], *flags, before=f"export TMPDIR={folder}", stderr=log) as process,
    ):
        while "listening on" not in (line := (folder / "log").read_text()):
            assert process.poll() is None, line
            time.sleep(0.05)
        arguments["address"] = line.split("listening on ")[1].split()[0]
        yield process, arguments, folder


@contextlib.contextmanager
def connected(arguments, count=2):
    clients = [AsyncLLM.connect(**arguments) for _ in range(count)]
    try:
        yield clients
    finally:
        for client in clients:
            client.shutdown()


async def answers_of(clients):
    outputs = [answer(client, prompt, greedy(80, ignore_eos=True)) for client in clients for prompt in PROMPTS]
    return [output.outputs[0].token_ids for output in await asyncio.gather(*outputs)]


def are_under_way(clients):
    async def condition():
        live = [completion for client in clients for _, completion in client.cores.first.requests.live()]
        return len(live) == 2 * len(clients) and all(completion.num_tokens > 3 for completion in live)

    return condition


def core_of(process):
    """Return the core process of a parent."""
    [core] = [child for child in psutil.Process(process.pid).children() if child.name() not in HELPER_NAMES]
    return core


def test_streams_of_two_clients_continue_when_their_core_is_killed(parent):
    process, arguments, _ = parent
    with connected(arguments) as clients:

        async def run():
            expected = await answers_of(clients)
            before = await clients[0].core_status()
            streams = asyncio.create_task(answers_of(clients))
            await eventually(are_under_way(clients))
            killed = core_of(process)
            killed.kill()
            assert await streams == expected
            for client in clients:
                for status in (await client.core_status(), client.last_core_status()):
                    assert status["restarts"] > before["restarts"]
                    assert status["incarnation"] > before["incarnation"]
                    assert f"{killed.pid} ended with signal SIGKILL" in status["last_death"]

        asyncio.run(asyncio.wait_for(run(), 120))
    assert process.poll() is None


def test_core_that_is_killed_before_its_parent_has_greeted_it_gets_a_successor(model, tmp_path):
    address = f"ipc://{tmp_path}/core.sock"
    flags = (*FLAGS[:-1], f"slow@load,seconds=0.02;{FLAGS[-1]}")
    with standalone_core(model, address, *flags) as process:
        while not status_path(tmp_path / "core.sock").exists():  # the core has not loaded the model yet
            assert process.poll() is None
            time.sleep(0.001)
        process.send_signal(signal.SIGSTOP)
        try:
            with connected({"address": address}) as clients:

                async def run():
                    streams = asyncio.create_task(answers_of(clients))
                    await eventually(are_under_way(clients))
                    core_of(process).kill()
                    process.send_signal(signal.SIGCONT)
                    recovered = await streams
                    assert recovered == await answers_of(clients)
                    assert (await clients[0].core_status())["restarts"] == 1

                asyncio.run(asyncio.wait_for(run(), 120))
            assert process.poll() is None
        finally:
            process.send_signal(signal.SIGCONT)


def test_parent_and_core_that_are_stopped_and_continued_together_go_on(model, tmp_path):
    with (
        standalone_core(model, f"ipc://{tmp_path}/core.sock", *FLAGS) as process,
        connected({"address": f"ipc://{tmp_path}/core.sock"}) as clients,
    ):

        async def run():
            expected = await answers_of(clients)
            streams = asyncio.create_task(answers_of(clients))
            core, page = core_of(process), clients[0].cores.first.supervisor.core.page
            stopped = [process, core]

            async def limit_is_known():
                return page.step_limit_s > 0

            async def would_be_a_hang():
                return page.read().heartbeat_age > 4 * limit_s

            await eventually(limit_is_known)
            limit_s = page.step_limit_s
            for each in stopped:
                each.send_signal(signal.SIGSTOP)
            await eventually(would_be_a_hang)
            for each in stopped:
                each.send_signal(signal.SIGCONT)
            assert await streams == expected
            assert (await clients[0].core_status())["restarts"] == 0
            core.send_signal(signal.SIGSTOP)  # alone, it is a hang
            assert await answers_of(clients) == expected
            assert "the limit of its step, stopped by a signal" in (await clients[0].core_status())["last_death"]

        try:
            asyncio.run(asyncio.wait_for(run(), 120))
        finally:
            process.send_signal(signal.SIGCONT)


@pytest.mark.slow
def test_clients_find_out_that_their_core_hangs_and_continue_on_the_next(parent, monkeypatch):
    monkeypatch.setattr(supervisor, "_PARENT_MARGIN_S", 0.1)
    process, arguments, _ = parent
    with connected(arguments) as clients:

        async def run():
            expected = await answers_of(clients)
            streams = asyncio.create_task(answers_of(clients))
            await eventually(are_under_way(clients))
            core = core_of(process)
            process.send_signal(signal.SIGSTOP)  # the clients are on their own
            core.send_signal(signal.SIGSTOP)

            async def all_know():
                return all("RECOVERING" in client.last_core_status().values() for client in clients)

            await eventually(all_know)
            for client in clients:
                assert "for 2.1 s" in client.last_core_status()["reason"]
                with pytest.raises(EngineError):
                    await client.ping(0.1)
            process.send_signal(signal.SIGCONT)
            assert await streams == expected
            assert "made no progress for" in (await clients[0].core_status())["last_death"]
            assert not core.is_running()

        try:
            asyncio.run(asyncio.wait_for(run(), 120))
        finally:
            process.send_signal(signal.SIGCONT)


def test_stopped_core_ends_with_its_parent_and_streams_go_on_on_the_next(model, tmp_path):
    """The system wakes it, with SIGHUP, because its process group has no parent any more that could."""
    address = f"ipc://{tmp_path}/core.sock"
    with standalone_core(model, address, *FLAGS) as process, connected({"address": address}) as clients:

        async def run():
            expected = await answers_of(clients)
            streams = asyncio.create_task(answers_of(clients))
            await eventually(are_under_way(clients))
            core = core_of(process)
            core.send_signal(signal.SIGSTOP)

            async def has_stopped():
                return all(is_stopped(thread.id) for thread in core.threads())

            await eventually(has_stopped)  # the system does not wake a process that has yet to stop
            process.kill()
            process.wait()
            await asyncio.to_thread(core.wait, 60)
            with standalone_core(model, address, *FLAGS):
                assert await streams == expected

        asyncio.run(asyncio.wait_for(run(), 120))


def test_parent_is_small(parent):
    process = psutil.Process(parent[0].pid)
    assert process.memory_info().rss < 60e6
    assert not any("torch" in library.path for library in process.memory_maps())


@pytest.mark.parametrize("parent", ["ipc"], indirect=True)
def test_nothing_is_left_of_a_parent_that_is_killed(parent):
    process, _, folder = parent
    core = core_of(process)
    process.kill()
    core.wait(60)

    async def is_clean():
        return [path.name for path in folder.iterdir()] == ["log"]

    asyncio.run(eventually(is_clean))


@pytest.mark.parametrize("parent", ["tcp"], indirect=True)
def test_nothing_is_left_of_a_parent_whose_drain_a_second_signal_ends(parent):
    process, arguments, folder = parent
    with connected(arguments, 1) as [client]:

        async def run():
            request = asyncio.create_task(answer(client, PROMPTS[0], greedy(100, ignore_eos=True)))
            await eventually(lambda: _has_tokens(client))
            os.kill((await client.core_status())["pid"], signal.SIGSTOP)  # so that the drain cannot end by itself
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 30) == 130
            assert not request.done()

        asyncio.run(asyncio.wait_for(run(), 120))
    assert [path.name for path in folder.iterdir()] == ["log"]


def test_request_during_a_drain_completes_on_the_next_core_and_restarts_are_bounded(model, tmp_path):
    address = f"ipc://{tmp_path}/core.sock"
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(standalone_core(model, address, *FLAGS))
        [first, second] = stack.enter_context(connected({"address": address}))

        async def run():
            expected = (await answer(first, PROMPTS[1], greedy(20))).outputs[0].token_ids
            running = asyncio.create_task(answer(first, PROMPTS[0], greedy(100, ignore_eos=True)))
            await eventually(lambda: _has_tokens(first))
            process.send_signal(signal.SIGINT)
            while True:
                late = asyncio.create_task(answer(second, PROMPTS[1], greedy(20)))
                await eventually(lambda: _is_sent(second))
                status = await second.core_status()
                if status["num_running"] + status["num_waiting"] == 1 and not late.done():
                    break  # the core, which drains, has not admitted the request
                await late
            assert len((await running).outputs[0].token_ids) == 100
            assert await asyncio.to_thread(process.wait, 30) == 0
            assert not list(tmp_path.iterdir())
            successor = stack.enter_context(standalone_core(model, address, *FLAGS, "--max-core-restarts", "0"))
            assert (await late).outputs[0].token_ids == expected
            core_of(successor).kill()
            _, stderr = await asyncio.to_thread(successor.communicate, None, 30)
            assert successor.returncode == 1
            assert "more than max_core_restarts=0 times" in stderr
            assert "ended with signal SIGKILL" in stderr

        asyncio.run(asyncio.wait_for(run(), 120))
        assert not list(tmp_path.iterdir())


async def _is_sent(client):
    return bool(client.cores.first.requests.live())


async def _has_tokens(client):
    return any(completion.num_tokens for _, completion in client.cores.first.requests.live())
