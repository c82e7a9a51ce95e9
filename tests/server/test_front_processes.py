"""Several front processes share a core and a port."""

import asyncio
import contextlib
import os
import signal
import urllib.request

import httpx
import psutil
import pytest
from support.engine_fixtures import SLOW_STEPS
from support.server_process import StreamedAnswers, served

pytestmark = pytest.mark.usefixtures("forked_programs")

_FLAGS = ("--api-server-count", "2", "--metrics-port", "0", "--num-threads", "1", "--fault-injection", SLOW_STEPS)
_NUM_STREAMS = 16
_TOKENS = 24


@pytest.fixture(scope="module")
def fronts(small_model, tmp_path_factory):
    """A server with two front processes, ready."""
    folder = tmp_path_factory.mktemp("fronts")
    with served(small_model, folder, *_FLAGS, TMPDIR=str(folder)) as server:
        server.wait_until_ready()
        yield server
        server.process.terminate()
        assert server.process.wait(30) == 0, server.log.read_text()
        assert [path.name for path in folder.iterdir()] == ["server.log"]


def _front_pids(server):
    """Return the process ids of the front processes."""
    pids = set()
    for child in psutil.Process(server.pid).children():
        with contextlib.suppress(psutil.Error):  # it has just died
            if "vllm_mp.server.front.process" in child.cmdline():
                pids.add(child.pid)
    return pids


def _num_connections(pid):
    """Return how many clients are connected to a process."""
    connections = psutil.Process(pid).net_connections("tcp")
    return sum(connection.status == psutil.CONN_ESTABLISHED for connection in connections)


def _metric(server, prefix):
    """Return the sum of the samples in /metrics that begin with `prefix`."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(prefix))


def test_server_with_two_front_processes_says_once_that_smaller_weights_are_faster(fronts):
    hint = "The weights are in float32; --quantization int8 is faster"
    fronts.wait_for(lambda: hint in fronts.log.read_text())
    assert fronts.log.read_text().count(hint) == 1


@pytest.mark.slow
def test_streams_through_two_front_processes_complete_after_a_kill_of_their_core(fronts):
    prompts = [f"The number {index} is" for index in range(_NUM_STREAMS)]
    expected = asyncio.run(StreamedAnswers(fronts, prompts, _TOKENS).run())
    first = fronts.core_pid()

    async def disturbed():
        answers = StreamedAnswers(fronts, prompts, _TOKENS)
        running = asyncio.create_task(answers.run())
        await answers.is_halfway.wait()
        assert all(_num_connections(pid) for pid in _front_pids(fronts))
        os.kill(first, signal.SIGKILL)
        return await running, answers.ends

    texts, ends = asyncio.run(disturbed())
    assert ends == ["length"] * _NUM_STREAMS
    assert texts == expected
    assert fronts.core_pid() != first
    assert _metric(fronts, "vllm_mp:core_restarts_total") == 1, "only the parent counts restarts"
    assert _metric(fronts, 'vllm_mp:core_restarts_total{cause="signal"') == 1
    assert _metric(fronts, "vllm_mp:recovered_requests_total") == _NUM_STREAMS


def test_front_process_that_is_killed_is_started_again_and_the_core_lives_on(fronts):
    core, before = fronts.core_pid(), _front_pids(fronts)
    os.kill(min(before), signal.SIGKILL)
    # Connections that the kernel gives to the new process wait until it serves.
    for _ in range(8):
        assert fronts.post("/v1/completions", {"prompt": "Hello", "max_tokens": 1})[0] == 200
    fronts.wait_for(lambda: len(_front_pids(fronts) - before) == 1)
    assert fronts.core_pid() == core


def test_metrics_of_all_front_processes_are_added_up(fronts):
    before = _metric(fronts, "vllm:generation_tokens_total")
    for _ in range(8):
        assert fronts.post("/v1/completions", {"prompt": "Hello", "max_tokens": 2, "ignore_eos": True})[0] == 200
    assert _metric(fronts, "vllm:generation_tokens_total") == before + 16
    url = fronts.process.stdout.readline().removeprefix("metrics at ").strip()
    for _ in range(4):
        assert "vllm:generation_tokens_total{" in httpx.get(url).text


@pytest.mark.slow
def test_no_process_outlives_a_server_that_is_killed(small_model, tmp_path):
    with served(small_model, tmp_path, *_FLAGS, TMPDIR=str(tmp_path)) as server:
        server.wait_until_ready()
        children = psutil.Process(server.pid).children(recursive=True)
        server.process.kill()
        _, alive = psutil.wait_procs(children, 20)
        assert not alive
    assert [path.name for path in tmp_path.iterdir()] == ["server.log"]


@pytest.mark.slow
def test_request_that_kills_every_core_fails_alone(small_model, tmp_path):
    flags = ("--fault-injection", f"{SLOW_STEPS};segv@request=poison")
    with served(small_model, tmp_path, *_FLAGS, *flags) as server:
        server.wait_until_ready()

        async def run():
            answers = StreamedAnswers(server, [f"The number {index} is" for index in range(8)], 64)
            running = asyncio.create_task(answers.run())
            await answers.all_run.wait()
            body = {"prompt": "Hello", "max_tokens": 4}
            poison = await asyncio.to_thread(server.post, "/v1/completions", body, **{"X-Request-Id": "poison"})
            await running
            return poison, answers.ends

        (status, body), ends = asyncio.run(run())
        assert (status, body["error"]["code"]) == (500, "generation_failed")
        assert ends == ["length"] * 8
