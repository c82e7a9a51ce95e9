"""The life of a server process: its start, its drain, its end, and what is left afterwards."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys

import httpx
import psutil
import pytest
from support.engine_fixtures import SLOW_STEPS
from support.server_process import StreamedAnswers, served

from vllm_mp import cli
from vllm_mp.model_store import DEFAULT_MODEL
from vllm_mp.server.app import build_app
from vllm_mp.server.front.listening import listen, listen_at_path, removing_file_of
from vllm_mp.server.http.admission import Admission
from vllm_mp.server.http.options import ServerOptions
from vllm_mp.server.run import ServerProcess
from vllm_mp.testing.engines import eventually, replay_core

pytestmark = pytest.mark.usefixtures("forked_programs")

_TOKENS = 40
_ENDLESS = 4000
"""Tokens of a stream that only a signal ends."""


@pytest.fixture(scope="module")
def slow_core(default_model, tmp_path_factory):
    """The address of a core that streams 20 tokens per second, so that a stream of `_TOKENS` takes 2 seconds."""
    with replay_core(tmp_path_factory.mktemp("slow"), "--rate", "20") as address:
        yield address


def _serve_from(address, folder, *flags):
    """Return the context of a server over the core at `address`."""
    return served(DEFAULT_MODEL, folder, "--connect", address, *flags, core_flags=())


async def _signal_during_streams(server, number, num_tokens=_TOKENS):
    """Send a signal once 4 streams run; return them, and the task that reads them."""
    answers = StreamedAnswers(server, ["Hello"] * 4, num_tokens)
    running = asyncio.create_task(answers.run())
    await answers.all_run.wait()
    server.process.send_signal(number)
    return answers, running


@pytest.mark.essential
def test_server_listens_while_it_loads_and_ends_on_a_signal(tmp_path, capsys):
    with _serve_from(f"ipc://{tmp_path}/no-core.sock", tmp_path) as server:
        assert server.get("/health") == (200, {"status": "ok"})
        status, body = server.get("/ready")
        assert (status, body) == (503, {"status": "starting"})
        status, body = server.post("/v1/completions", {"prompt": "Hello"})
        assert (status, body["error"]["code"]) == (503, "loading")
        assert (cli.main(["health", server.url]), cli.main(["health", "--ready", server.url])) == (0, 1)
        assert capsys.readouterr().out == f"{server.url}: 200\n{server.url}: 503\n"
        server.process.terminate()
        assert server.process.wait(60) == 0
        assert cli.main(["health", server.url]) == 1


def test_metrics_and_probes_have_a_port_of_their_own_that_needs_no_key(slow_core, tmp_path):
    with _serve_from(slow_core, tmp_path, "--metrics-port", "0", "--api-key", "secret") as server:
        server.wait_until_ready()
        url = server.process.stdout.readline().removeprefix("metrics at ").strip()
        assert server.get("/metrics")[0] == 401
        metrics = httpx.get(url)
        assert metrics.status_code == 200
        assert "vllm:num_requests_running" in metrics.text
        for path, status in {"/health": 200, "/ready": 200, "/v1/models": 404, "/core_status": 404, "/": 404}.items():
            assert httpx.get(url.replace("/metrics", path)).status_code == status
        assert httpx.get(url, headers={"Host": "attacker.example"}).status_code == 403
        server.process.terminate()
        assert server.process.wait(60) == 0


def test_second_signal_does_not_wait_for_the_start_to_end():
    async def run():
        cancelled = asyncio.Event()

        async def load():
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                await asyncio.Event().wait()  # as the download of a model, which cannot be cancelled

        def on_listening():
            os.kill(os.getpid(), signal.SIGTERM)

        process = ServerProcess(ServerOptions(), None, listen("127.0.0.1", 0), load)
        async with asyncio.timeout(60):
            running = asyncio.create_task(process.run(on_listening, lambda engine: None))
            await cancelled.wait()
            os.kill(os.getpid(), signal.SIGTERM)
            assert await running == 130

    asyncio.run(run())


def test_port_in_use_ends_the_command_with_code_1_and_says_so(server):
    command = [sys.executable, "-m", "vllm_mp.cli", "serve", "--port", str(server.port)]
    for flags in ([], ["--api-server-count", "2"]):
        done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1
        assert f"cannot listen on 127.0.0.1:{server.port}" in done.stderr
        assert "choose another --port" in done.stderr


@pytest.mark.parametrize("count", [1, 2])
def test_server_on_a_unix_socket_replaces_the_file_of_a_killed_server_and_removes_its_own(
    slow_core, tmp_path, count, capsys
):
    path = tmp_path / "http socket"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    flags = ("--uds", str(path), "--api-server-count", str(count), "--metrics-port", "0")
    with _serve_from(slow_core, tmp_path, *flags) as server:
        assert server.url == f"unix:{path}"
        assert server.process.stdout.readline().startswith("metrics at http://127.0.0.1:")
        ready = server.process.stdout.readline()
        assert f"ready: unix:{path} serves " in ready
        assert f"curl --unix-socket '{path}' http://localhost/v1/completions" in ready
        assert cli.main(["health", "--ready", server.url]) == 0
        assert capsys.readouterr().out == f"{server.url}: 200\n"
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as client:
            with client.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 3, "stream": True}) as got:
                assert got.read().endswith(b"data: [DONE]\n\n")
            assert client.get("/health", headers={"Host": "attacker.example"}).status_code == 403
        with pytest.raises(OSError, match=r"Address already in use; .* stop the process that listens there"):
            listen_at_path(str(path), 1)
        server.process.terminate()
        assert server.process.wait(60) == 0, server.log.read_text()
    assert not path.exists()
    assert cli.main(["health", server.url]) == 1


def test_only_the_socket_file_of_a_server_that_has_ended_is_replaced_or_removed(tmp_path):
    path = tmp_path / "socket"
    path.write_text("a file")
    with pytest.raises(OSError, match=f"cannot listen on unix:{path}: .*; the path is not that of a socket; choose"):
        listen_at_path(str(path), 1)
    assert path.read_text() == "a file"
    path.unlink()
    for wrong in (tmp_path / "none" / "socket", tmp_path / ("x" * 108)):
        with pytest.raises(OSError, match=r"cannot listen on unix:.*; give --uds a path in a folder that exists"):
            listen_at_path(str(wrong), 1)
    first, second = listen_at_path(str(path), 2)
    with first, second, removing_file_of(first):
        first.close()  # a front process that dies
        with pytest.raises(OSError, match="Address already in use"):
            listen_at_path(str(path), 1)
        path.unlink()
        [later] = listen_at_path(str(path), 1)
    with later:
        assert path.is_socket()
        with removing_file_of(later):
            pass
    assert not path.exists()


def test_drain_completes_live_streams_and_refuses_new_requests(slow_core, tmp_path):
    with _serve_from(slow_core, tmp_path) as server:
        server.wait_until_ready()

        async def run():
            answers, running = await _signal_during_streams(server, signal.SIGTERM)
            async with httpx.AsyncClient(base_url=server.url) as client:

                async def is_draining():
                    return (await client.get("/ready")).status_code == 503

                await eventually(is_draining)
                assert (await client.get("/ready")).json()["reason"] == "the server is shutting down"
                assert (await client.get("/health")).status_code == 200
                refused = await client.post("/v1/completions", json={"prompt": "Hello"})
            assert refused.status_code == 503
            assert refused.headers["Retry-After"]
            assert refused.json()["error"]["code"] == "server_unavailable"
            await running
            assert answers.ends == ["length"] * 4

        asyncio.run(run())
        assert server.process.wait(30) == 0


def test_drain_timeout_ends_live_streams_with_an_error(slow_core, tmp_path):
    with _serve_from(slow_core, tmp_path, "--drain-timeout", "0") as server:
        server.wait_until_ready()

        async def run():
            answers, running = await _signal_during_streams(server, signal.SIGINT, _ENDLESS)
            await running
            assert answers.ends == ["the server is shutting down"] * 4

        asyncio.run(run())
        assert server.process.wait(30) == 0


@pytest.mark.parametrize("count", ["1", "2"])
def test_second_signal_ends_the_server_at_once(slow_core, tmp_path, count):
    with _serve_from(slow_core, tmp_path, "--api-server-count", count) as server:
        server.wait_until_ready()

        async def run():
            answers, running = await _signal_during_streams(server, signal.SIGINT, _ENDLESS)
            assert server.process.stdout.readline().startswith("ready: ")
            assert server.process.stdout.readline().startswith("shutting down: finishing 4 requests, ")
            server.process.send_signal(signal.SIGINT)
            with contextlib.suppress(ConnectionResetError, ExceptionGroup):
                await running
            assert "length" not in answers.ends

        asyncio.run(run())
        assert server.process.wait(30) == 130


def test_drain_of_several_front_processes_completes_their_streams(slow_core, tmp_path):
    with _serve_from(slow_core, tmp_path, "--api-server-count", "2") as server:
        server.wait_until_ready()

        async def run():
            answers, running = await _signal_during_streams(server, signal.SIGTERM)
            await running
            assert answers.ends == ["length"] * 4

        asyncio.run(run())
        assert server.process.wait(30) == 0


@pytest.mark.parametrize("count", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_server_ends_with_code_1_when_its_core_is_gone_for_good(small_model, tmp_path, count):
    flags = ("--max-core-restarts", "0", "--api-server-count", count, "--fault-injection", SLOW_STEPS)
    with served(small_model, tmp_path, *flags, TMPDIR=str(tmp_path)) as server:
        server.wait_until_ready()

        async def run():
            answers = StreamedAnswers(server, ["Hello"] * 4, 200)
            running = asyncio.create_task(answers.run())
            await answers.all_run.wait()
            children = psutil.Process(server.pid).children(recursive=True)
            os.kill(server.core_pid(), signal.SIGKILL)
            await running
            return answers.ends, children

        ends, children = asyncio.run(run())
        assert all("the core has died more than max_core_restarts=0" in end for end in ends), ends
        assert server.process.wait(30) == 1
        assert "max_core_restarts=0" in server.log.read_text()
        assert not any(child.is_running() for child in children)
    assert [path.name for path in tmp_path.iterdir()] == ["server.log"]


@pytest.mark.slow
def test_core_ends_with_a_server_that_is_killed(small_model, tmp_path):
    with served(small_model, tmp_path, TMPDIR=str(tmp_path)) as server:
        server.wait_until_ready()
        children = psutil.Process(server.pid).children(recursive=True)
        server.process.kill()
        _, alive = psutil.wait_procs(children, 20)
        assert not alive
    assert [path.name for path in tmp_path.iterdir()] == ["server.log"]


@pytest.mark.essential
def test_request_beyond_the_limit_is_refused_until_another_ends(replay_engine):
    async def run():
        admission = Admission(2)
        transport = httpx.ASGITransport(build_app(replay_engine, ServerOptions(), admission))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

            async def ask(prompt):
                return await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})

            async with admission.admit(1):
                assert (await ask("Hello")).status_code == 200
                refused = await ask(["Hello", "Hello"])
                assert refused.status_code == 429
                assert refused.headers["Retry-After"]
                assert refused.json()["error"]["type"] == "rate_limit_error"
            assert (await ask(["Hello", "Hello"])).status_code == 200
            assert (await ask(["Hello"] * 3)).status_code == 400
        assert admission.num_live == 0

    asyncio.run(run())


def test_client_that_reads_late_gets_the_whole_text_in_few_events(replay_address, tmp_path):
    body = {"prompt": "Hello", "max_tokens": 8000, "ignore_eos": True, "temperature": 0}

    async def late_lines(url):
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            whole = (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
            async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:

                async def core_has_sent_all():
                    return (await client.get("/core_status")).json()["num_running"] == 0

                await eventually(core_has_sent_all)
                return whole, [line async for line in response.aiter_lines() if line.startswith("data: {")]

    with _serve_from(replay_address, tmp_path) as server:
        server.wait_until_ready()
        whole, lines = asyncio.run(late_lines(server.url))
    texts = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines]
    assert "".join(texts) == whole
    assert 1 < len(lines) < 7000
