"""The endpoints for operators need an operator's key, and do what the calls of the engine do."""

import asyncio

import httpx
import pytest

from vllm_mp.server.app import build_app
from vllm_mp.server.http.options import ServerOptions
from vllm_mp.testing.engines import eventually, running_engine

KEY = {"Authorization": "Bearer op"}
OPTIONS = {"operator_key": ("op",)}


@pytest.fixture
def ask(in_process):
    """A function that sends requests, each a method, a path and options, to one application; returns the responses."""

    def send(*requests, **options):
        async def play():
            async with in_process(**options) as client:
                return [await client.request(method, path, **given) for method, path, given in requests]

        return asyncio.run(play())

    return send


def test_calls_of_operators_need_a_key_of_theirs(ask):
    refused, none, wrong, other = (
        ask(("POST", "/sleep", {}))[0],
        ask(("POST", "/sleep", {}), **OPTIONS)[0],
        ask(("POST", "/sleep", {"headers": {"Authorization": "Bearer user"}}), **OPTIONS, api_key=("user",))[0],
        ask(("GET", "/v1/models", {"headers": KEY}), **OPTIONS, api_key=("user",))[0],
    )
    assert refused.status_code == 403
    assert "--operator-key-file" in refused.json()["error"]["message"]
    assert [none.status_code, wrong.status_code, other.status_code] == [401, 401, 401]
    [allowed] = ask(("GET", "/is_paused", {"headers": KEY}), **OPTIONS, api_key=("user",))
    assert allowed.json() == {"is_paused": False}


def test_pause_sleep_and_calls_of_workers_reach_the_engine(small_model, forked_cores):
    with running_engine(small_model, device="cpu", num_threads=1) as engine:
        app = build_app(engine, ServerOptions(**OPTIONS))

        async def send(method, path, given):
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=KEY) as client:
                return await client.request(method, path, **given)

        async def abort(path, body, shown_id):
            await send("POST", "/pause?mode=keep", {})
            answer = asyncio.create_task(send("POST", path, {"json": body | {"request_id": "x"}}))

            async def is_live():
                return len(engine.output_processor) > 0

            await eventually(is_live)
            await send("POST", "/abort_requests", {"json": {"request_ids": [shown_id]}})
            reasons = {choice["finish_reason"] for choice in (await answer).json()["choices"]}
            await send("POST", "/resume", {})
            return reasons

        check_calls(lambda method, path, **given: asyncio.run(send(method, path, given)))
        texts, tokens = {"prompt": ["a", "b"]}, {"token_ids": [1], "sampling_params": {}}
        assert asyncio.run(abort("/v1/completions", texts, "cmpl-x")) == {"abort"}
        assert asyncio.run(abort("/inference/v1/generate", tokens, "x")) == {"abort"}


def assert_in_metrics(call, line):
    """The metrics show what a busy core has answered last, so they may be late."""
    assert any(line in call("GET", "/metrics").text for _ in range(60)), line


def check_calls(call):
    assert call("POST", "/pause?mode=keep&clear_cache=false").status_code == 200
    assert call("GET", "/is_paused").json() == {"is_paused": True}
    assert call("POST", "/resume/").status_code == 200, "a slash at the end changes nothing"
    assert call("POST", "/sleep?level=1").status_code == 200
    assert call("GET", "/is_sleeping").json() == {"is_sleeping": True}
    assert_in_metrics(call, 'sleep_state="weights_offloaded"} 1.0')
    assert call("POST", "/wake_up?tags=weights&tags=kv_cache").status_code == 200
    assert call("GET", "/is_sleeping").json() == {"is_sleeping": False}
    assert_in_metrics(call, 'sleep_state="awake"} 1.0')
    assert call("POST", "/reset_prefix_cache").status_code == 200
    assert call("POST", "/restart_core").status_code == 200
    [count] = call("POST", "/collective_rpc", json={"method": "get_num_parameters"}).json()["results"]
    assert count > 1000
    assert call("GET", "/server_info").json()["vllm_config"]["model_config"]["model"]
    assert call("POST", "/abort_requests", json={"request_ids": ["chatcmpl-none", "msg_none"]}).status_code == 200
    for path, message in (
        ("/sleep?level=x", "level must be an integer, got 'x'"),
        ("/sleep?level=7", "level"),
        ("/pause?clear_cache=maybe", "clear_cache must be true or false, got 'maybe'"),
        ("/wake_up?tags=moon", "moon"),
    ):
        refused = call("POST", path)
        assert refused.status_code == 400
        assert message in refused.json()["error"]["message"]
    for given, status, message in (
        ({"method": "exec"}, 400, "no public method 'exec'"),
        ({"method": "check_health", "timeout": -1}, 400, "timeout must be a number of seconds above 0"),
        ({"method": "check_health", "timeout": 1e-9}, 504, "collective_rpc('check_health') has not ended within"),
    ):
        refused = call("POST", "/collective_rpc", json=given)
        assert refused.status_code == status
        assert message in refused.json()["error"]["message"]
