"""A core that was started by hand, with clients that connect and leave."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.engine_fixtures import SLOW_STEPS

from vllm_mp import AsyncLLM, EngineDeadError, EngineStartError, SamplingParams
from vllm_mp.keys.curve_keys import make_client_key, read_server_key
from vllm_mp.testing import engines
from vllm_mp.testing.engines import answer, eventually, free_tcp_address, greedy, is_empty, make_keys

pytestmark = pytest.mark.usefixtures("forked_programs")


def standalone_core(model, address, *flags, **options):
    """Run a core whose streams last long enough for a fault."""
    flags = ("--num-threads", "1", "--fault-injection", SLOW_STEPS, *flags)
    return engines.standalone_core(model, address, *flags, **options)


@pytest.mark.essential
def test_clients_share_a_core_and_leave_independently(small_model, tmp_path):
    address = f"ipc://{tmp_path}/a core.sock"
    with standalone_core(small_model, address) as process:
        first = AsyncLLM.connect(address)
        second = AsyncLLM.connect(address)

        async def run():
            texts = [
                output.outputs[0].text
                for output in await asyncio.gather(
                    *(answer(client, "The capital of France is", greedy(6)) for client in (first, second))
                )
            ]
            assert texts[0] == texts[1]
            stream = first.generate("Hello", SamplingParams(max_tokens=400, ignore_eos=True))
            await anext(stream)
            first.shutdown()
            with pytest.raises(EngineDeadError):
                await anext(stream)
            await eventually(lambda: is_empty(second))
            assert psutil.Process((await second.core_status())["pid"]).ppid() == process.pid

        asyncio.run(run())
        second.shutdown()
        process.terminate()
        assert process.wait(30) == 0
        log = process.stderr.read()
    clients = re.findall(rf"core: (client \d+ \(process {os.getpid()}\)) has connected\n", log)
    assert len(clients) == log.count("has connected") == 2, "the parent is no client"
    assert f"core: {clients[0]} has left\n" in log
    assert not list(Path(tmp_path).iterdir())


def test_core_outlives_a_killed_client_whose_requests_it_drops_and_a_second_core_at_its_address(small_model, tmp_path):
    address = f"ipc://{tmp_path}/core.sock"
    with standalone_core(small_model, address) as process:
        survivor = AsyncLLM.connect(address)
        code = (
            "import asyncio, os\nfrom vllm_mp import AsyncLLM, SamplingParams\n"
            f"llm = AsyncLLM.connect({address!r})\n"
            "async def main():\n"
            "    stream = llm.generate('Hello', SamplingParams(max_tokens=450, ignore_eos=True))\n"
            "    await anext(stream)\n"
            "    os.kill(os.getpid(), 9)\n"
            "asyncio.run(main())\n"
        )
        done = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
        assert done.returncode == -signal.SIGKILL

        async def run():
            await eventually(lambda: is_empty(survivor))
            assert (await answer(survivor, "Hello", greedy(3))).finished

        asyncio.run(run())
        with standalone_core(small_model, address) as second:
            _, stderr = second.communicate(timeout=60)
            assert second.returncode == 1
            assert f"served by process {process.pid}" in stderr
        assert asyncio.run(answer(survivor, "Hello", greedy(3))).finished
        survivor.shutdown()


def test_clients_with_short_reconnect_timeout_fail_when_the_core_is_killed(small_model, tmp_path):
    address = f"ipc://{tmp_path}/core.sock"
    with standalone_core(small_model, address) as process:
        clients = [AsyncLLM.connect(address, reconnect_timeout=timeout) for timeout in (0, 0.5)]

        async def run():
            streams = [client.generate("Hello", SamplingParams(max_tokens=450, ignore_eos=True)) for client in clients]
            for stream in streams:
                await anext(stream)
            process.kill()
            for stream in streams:
                with pytest.raises(EngineDeadError, match="connection"):
                    async for _ in stream:
                        pass

        asyncio.run(asyncio.wait_for(run(), 120))
        for client in clients:
            client.shutdown()


@pytest.mark.essential
def test_streams_of_all_clients_continue_with_the_next_core_at_the_address(small_model, tmp_path):
    address = f"ipc://{tmp_path}/core.sock"
    prompts = ["The first", "The second one", "Another"]

    async def outputs_of(clients):
        return await asyncio.gather(
            *(answer(client, prompt, greedy(40, ignore_eos=True)) for client in clients for prompt in prompts)
        )

    with contextlib.ExitStack() as stack:
        process = stack.enter_context(standalone_core(small_model, address))
        clients = [AsyncLLM.connect(address) for _ in range(2)]

        async def run():
            expected = await outputs_of(clients)
            task = asyncio.create_task(outputs_of(clients))

            async def all_under_way():
                live = [completion for client in clients for _, completion in client.cores.first.requests.live()]
                return len(live) == 6 and all(len(completion.token_ids) > 3 for completion in live)

            await eventually(all_under_way)
            process.kill()
            process.wait()
            stack.enter_context(standalone_core(small_model, address))
            outputs = await asyncio.wait_for(task, 120)
            assert [output.outputs[0].token_ids for output in outputs] == [
                output.outputs[0].token_ids for output in expected
            ]
            assert [output.outputs[0].text for output in outputs] == [output.outputs[0].text for output in expected]
            for client in clients:
                await eventually(lambda client=client: is_empty(client))
            third = await AsyncLLM.aconnect(address)
            assert (await answer(third, "Hello", greedy(3))).finished
            third.shutdown()

        asyncio.run(run())
        for client in clients:
            client.shutdown()


def test_client_refuses_a_successor_with_other_weights_of_the_same_configuration(small_model, tmp_path):
    address = f"ipc://{tmp_path}/core.sock"
    dummy = ("--load-format", "dummy", "--seed")
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(standalone_core(small_model, address, *dummy, "1"))
        client = AsyncLLM.connect(address)

        async def run():
            stream = client.generate("Hello", SamplingParams(max_tokens=450, ignore_eos=True))
            await anext(stream)
            process.kill()
            process.wait()
            stack.enter_context(standalone_core(small_model, address, *dummy, "2"))
            with pytest.raises(EngineDeadError, match=r"another model.*other weights"):
                async for _ in stream:
                    pass

        asyncio.run(run())
        client.shutdown()


def test_ctrl_c_lets_running_requests_finish_and_ends_the_core(small_model, tmp_path):
    address = f"ipc://{tmp_path}/core.sock"
    with standalone_core(small_model, address) as process:
        client = AsyncLLM.connect(address)

        async def run():
            stream = client.generate("Hello", SamplingParams(max_tokens=60, ignore_eos=True))
            await anext(stream)
            process.send_signal(signal.SIGINT)
            outputs = [output async for output in stream]
            assert len(outputs[-1].outputs[0].token_ids) == 60

        asyncio.run(run())
        client.shutdown()
        assert process.wait(30) == 0
        assert "\nfinishing 1 request; Ctrl-C again stops now\n" in process.stderr.read()


def _exists(path):
    async def condition():
        return path.exists() and path.stat().st_size > 0

    return condition


def test_tcp_client_needs_a_key_that_the_core_allows(small_model, tmp_path):
    with standalone_core(small_model, "tcp://127.0.0.1:1") as process:
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 2
        assert "vllm-mp keys server" in stderr
    server, own = make_keys(tmp_path)
    other = tmp_path / "other"
    make_client_key(other, read_server_key(server).public)
    log = tmp_path / "log"
    with (
        log.open("wb") as stderr,
        standalone_core(small_model, "tcp://127.0.0.1:0", "--key-file", server, stderr=stderr) as process,
    ):

        async def listens():
            assert process.poll() is None, log.read_text()
            return re.search(r"listening on (\S+)\n", log.read_text())

        asyncio.run(eventually(listens))
        address = re.search(r"listening on (\S+)\n", log.read_text())[1]
        client = AsyncLLM.connect(address, key_file=own)
        assert asyncio.run(answer(client, "Hello", greedy(3))).finished
        with pytest.raises(EngineStartError, match="vllm-mp keys allow"):
            AsyncLLM.connect(address, key_file=str(other), timeout=20)
        with pytest.raises(ValueError, match="key_file"):
            AsyncLLM.connect(address)
        client.shutdown()
        process.terminate()
        process.wait(30)
        assert re.search(r"client \d+ \(127\.0\.0\.1:\d+\) has connected\n", log.read_text())


def answer_as_http(address, num_connections):
    """Answer `num_connections` connections to a TCP address as a load balancer does that has no server."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with socket.create_server((host, int(port))) as listener:
        for _ in range(num_connections):
            peer, _ = listener.accept()
            with peer, contextlib.suppress(ConnectionResetError):
                peer.sendall(b"HTTP/1.1 503 Service Unavailable\r\n\r\n")
                while peer.recv(4096):
                    pass


def test_stream_continues_after_another_program_has_answered_at_the_address(small_model, tmp_path):
    server, own = make_keys(tmp_path)
    address = free_tcp_address()
    params = greedy(40, ignore_eos=True)
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(standalone_core(small_model, address, "--key-file", server))
        client, other = (AsyncLLM.connect(address, key_file=own) for _ in range(2))

        async def run():
            expected = await answer(client, "Hello", params)
            task = asyncio.create_task(answer(client, "Hello", params))

            async def is_under_way():
                return any(len(completion.token_ids) > 3 for _, completion in client.cores.first.requests.live())

            await eventually(is_under_way)
            process.kill()
            await asyncio.to_thread(process.wait)
            while True:  # the core ends after its parent
                with contextlib.suppress(OSError):
                    await asyncio.to_thread(answer_as_http, address, 4)
                    break
                await asyncio.sleep(0.05)
            await asyncio.wait_for(asyncio.to_thread(other.shutdown), 30)
            stack.enter_context(standalone_core(small_model, address, "--key-file", server))
            output = await asyncio.wait_for(task, 120)
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids

        asyncio.run(run())
        client.shutdown()


def test_connect_to_an_unserved_address_fails_at_the_timeout_and_names_it(tmp_path):
    with pytest.raises(EngineStartError, match=r"unserved\.sock"):
        AsyncLLM.connect(f"ipc://{tmp_path}/unserved.sock", timeout=0.3)
    with pytest.raises(ValueError, match="ipc://"):
        AsyncLLM.connect("http://localhost")
