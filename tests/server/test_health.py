"""What the server says about itself and its core."""

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.server_process import served

from vllm_mp import __version__
from vllm_mp.server.http.admission import Admission
from vllm_mp.server.http.options import ServerOptions
from vllm_mp.server.http.state import ServerState


@pytest.mark.essential
def test_a_ready_server_says_so_and_names_its_core(server):
    assert server.get("/health") == (200, {"status": "ok"})
    assert server.get("/ready") == (200, {"status": "ready"})
    assert server.get("/version") == (200, {"version": __version__})
    status, core = server.get("/core_status")
    assert status == 200
    assert core["answers"] is True
    assert core["pid"] != server.pid


def test_application_answers_through_a_core_without_a_model(in_process):
    async def run():
        async with in_process() as client:
            assert (await client.get("/ready")).json() == {"status": "ready"}

    asyncio.run(run())


def test_probes_at_the_same_time_share_a_ping_of_the_core(replay_engine, monkeypatch):
    pings = []

    async def run():
        asked, answers = asyncio.Event(), asyncio.Event()

        async def ping(timeout):
            pings.append(timeout)
            asked.set()
            await answers.wait()

        monkeypatch.setattr(replay_engine, "ping", ping)
        state = ServerState(replay_engine, ServerOptions(), Admission(1))
        probes = [asyncio.create_task(state.ping_core()) for _ in range(20)]
        await asked.wait()
        answers.set()
        await asyncio.gather(*probes)
        await state.ping_core()

    asyncio.run(run())
    assert len(pings) == 2


@pytest.fixture
def unused_server(small_model, tmp_path, forked_programs):
    """A server whose core has computed no step, so that it may stand still for long before it counts as hung."""
    with served(str(small_model), tmp_path) as process:
        process.wait_until_ready()
        yield process


def test_server_whose_core_hangs_is_alive_and_not_ready(unused_server):
    server = unused_server
    pid = server.core_pid()
    with ThreadPoolExecutor() as threads:
        os.kill(pid, signal.SIGSTOP)
        try:
            ready, status = threads.map(server.get, ["/ready", "/core_status"])
            assert server.get("/health")[0] == 200
        finally:
            os.kill(pid, signal.SIGCONT)
    assert ready[0] == 503
    assert "the core has not answered for 2 s" in ready[1]["reason"]
    assert status[0] == 200
    assert (status[1]["answers"], status[1]["pid"]) == (False, pid)
    server.wait_until_ready()
    assert server.core_pid() == pid


def test_reason_of_readiness_is_for_those_with_a_key(in_process):
    async def ask(headers):
        async with in_process(api_key=("k",)) as client:
            client._transport.app.state.server.admission.refuse("is shutting down")
            return (await client.get("/ready", headers=headers)).json()

    assert asyncio.run(ask({})) == {"status": "draining"}
    known = {"status": "draining", "reason": "the server is shutting down"}
    assert asyncio.run(ask({"Authorization": "Bearer k"})) == known
