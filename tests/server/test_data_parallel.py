"""A server with several cores."""

import asyncio
import os
import signal

import httpx
import psutil
import pytest
from support.server_process import StreamedAnswers, served

from vllm_mp import AsyncLLM
from vllm_mp.server.app import build_app
from vllm_mp.server.http.options import ServerOptions
from vllm_mp.testing.engines import replay_core

pytestmark = pytest.mark.usefixtures("forked_programs")

RANK = "X-data-parallel-rank"


@pytest.fixture(scope="module")
def engine(default_model, tmp_path_factory):
    """An engine of two replay cores."""
    folders = [tmp_path_factory.mktemp("replay") for _ in range(2)]
    with replay_core(folders[0]) as one, replay_core(folders[1]) as other:
        engine = AsyncLLM.connect(f"{one},{other}")
        yield engine
        engine.shutdown()


def ask(engine, *requests):
    """Return the responses of an application over `engine` to requests of (method, path, options)."""

    async def run():
        app = build_app(engine, ServerOptions())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return [await client.request(method, path, **options) for method, path, options in requests]

    return asyncio.run(run())


def completion(rank):
    return "POST", "/v1/completions", {"json": {"prompt": "a", "max_tokens": 3}, "headers": {RANK: rank}}


STATUS = "GET", "/core_status", {}


@pytest.mark.parametrize("rank", [0, 1])
def test_header_names_the_core_of_a_request(engine, rank):
    before, answer, after = ask(engine, STATUS, completion(str(rank)), STATUS)
    assert answer.status_code == 200
    steps = [
        then["step"] - now["step"] for then, now in zip(after.json()["cores"], before.json()["cores"], strict=True)
    ]
    assert [count > 0 for count in steps] == [rank == 0, rank == 1]


@pytest.mark.parametrize(("rank", "why"), [("2", "the ranks are 0, 1"), ("x", "must be the rank"), ("-1", "must be")])
def test_header_that_names_no_core_is_refused(engine, rank, why):
    (answer,) = ask(engine, completion(rank))
    assert answer.status_code == 400
    assert why in answer.json()["error"]["message"]


def test_metrics_have_the_load_of_each_core_under_its_rank(engine):
    (metrics,) = ask(engine, ("GET", "/metrics", {}))
    lines = [line for line in metrics.text.splitlines() if line.startswith("vllm:num_requests_running{")]
    assert [line.partition('engine="')[2][0] for line in lines] == ["0", "1"]
    totals = [line for line in metrics.text.splitlines() if line.startswith("vllm:generation_tokens_total{")]
    assert len(totals) == 1


@pytest.mark.slow
def test_streams_of_two_fronts_go_on_with_the_other_core_when_one_is_killed(small_model, tmp_path):
    flags = ["--api-server-count", "2", "--data-parallel-size", "2", "--num-threads", "1", "--max-model-len", "1024"]
    flags += ["--kv-cache-memory-bytes", str(2**27), "--fault-injection", "slow@step=*,seconds=0.02"]
    with served(small_model, tmp_path, *flags, TMPDIR=str(tmp_path)) as server:
        server.wait_until_ready()
        prompts = [f"The number {index} is" for index in range(8)]
        expected = asyncio.run(StreamedAnswers(server, prompts, 60).run())
        cores = server.get("/core_status")[1]["cores"]
        answers = StreamedAnswers(server, prompts, 60)

        async def disturbed():
            running = asyncio.create_task(answers.run())
            await answers.all_run.wait()
            os.kill(cores[1]["pid"], signal.SIGKILL)
            return await running

        assert asyncio.run(disturbed()) == expected
        server.wait_for(lambda: server.get("/core_status")[1]["cores"][1].get("pid") not in (None, cores[1]["pid"]))
        server.process.terminate()
        assert server.process.wait(30) == 0


def test_fronts_serve_on_without_a_core_that_is_gone_for_good_and_fail_with_the_last(small_model, tmp_path):
    flags = ["--api-server-count", "2", "--data-parallel-size", "2", "--num-threads", "1", "--max-model-len", "1024"]
    flags += ["--kv-cache-memory-bytes", str(2**27), "--fault-injection", "slow@step=*,seconds=0.02"]
    flags += ["--max-core-restarts", "0"]
    prompts = [f"The number {index} is" for index in range(8)]

    def states(server):
        """Return the states of both cores, as several connections, and so usually both fronts, tell them."""
        statuses = [server.get("/core_status")[1] for _ in range(8)]
        return {tuple(core["state"] for core in status.get("cores", [status])) for status in statuses}

    def answers_after(server, strike):
        answers = StreamedAnswers(server, prompts, 60)

        async def disturbed():
            running = asyncio.create_task(answers.run())
            await answers.all_run.wait()
            strike()
            return await running

        return asyncio.run(disturbed()), answers.ends

    def kill_front():
        fronts = [
            child
            for child in psutil.Process(server.pid).children()
            if "vllm_mp.server.front.process" in child.cmdline()
        ]
        fronts[0].kill()

    with served(small_model, tmp_path, *flags, TMPDIR=str(tmp_path)) as server:
        server.wait_until_ready()
        expected = asyncio.run(StreamedAnswers(server, prompts, 60).run())
        first, second = (core["pid"] for core in server.get("/core_status")[1]["cores"])
        assert answers_after(server, lambda: os.kill(first, signal.SIGKILL)) == (expected, ["length"] * 8)
        server.wait_for(lambda: all(state[0] == "DEAD" for state in states(server)))
        kill_front()
        assert asyncio.run(StreamedAnswers(server, prompts, 60).run()) == expected, (
            "a new front has the cores that are left"
        )
        _, ends = answers_after(server, lambda: os.kill(second, signal.SIGKILL))
        assert all("max_core_restarts=0" in end for end in ends)
        assert server.process.wait(30) == 1
