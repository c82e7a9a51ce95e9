"""/metrics: what Prometheus reads, against a replay core, and against a real server whose core is killed."""

import asyncio
import os
import signal
import time
import urllib.request

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from vllm_mp import AsyncLLM
from vllm_mp.server.app import build_app
from vllm_mp.server.http.options import ServerOptions
from vllm_mp.testing.engines import replay_core

OF_VLLM = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:gpu_cache_usage_perc": "gauge",
    "vllm:prefix_cache_queries": "counter",
    "vllm:engine_sleep_state": "gauge",
    "vllm:prefix_cache_hits": "counter",
    "vllm:prompt_tokens_cached": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:time_per_output_token_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_max_num_generation_tokens": "histogram",
    "vllm:request_params_n": "histogram",
    "vllm:request_params_max_tokens": "histogram",
    "vllm:cache_config_info": "gauge",
}
BODY = {"prompt": [1, 2, 3, 4, 5], "max_tokens": 4, "ignore_eos": True}


class Scrape:
    """The metrics of a response, by name and labels."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}

    def get(self, name: str, **labels: str) -> float:
        """Return the sum of the samples called `name` with `labels` among theirs."""
        return sum(
            sample.value
            for family in self.families.values()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


async def scrape(client: httpx.AsyncClient) -> Scrape:
    response = await client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return Scrape(response.text)


def scraped(url: str) -> Scrape:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        return Scrape(response.read().decode())


def client_of(app) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


@pytest.mark.essential
def test_metrics_have_the_names_types_and_labels_of_vllm(in_process, replay_engine):
    async def run():
        async with in_process() as client:
            return await scrape(client)

    found = asyncio.run(run())
    assert {name: found.families[name].type for name in OF_VLLM} == OF_VLLM
    model = replay_engine.model_config.served_model_name
    for name in OF_VLLM:
        for sample in found.families[name].samples:
            assert (sample.labels["model_name"], sample.labels["engine"]) == (model, "0")
    (info,) = found.families["vllm:cache_config_info"].samples
    cache = replay_engine.vllm_config.cache_config
    assert info.labels["block_size"] == str(cache.block_size)
    assert info.labels["num_gpu_blocks"] == str(cache.num_blocks - 1)
    reasons = {sample.labels["finished_reason"] for sample in found.families["vllm:request_success"].samples}
    assert reasons == {"stop", "length", "abort", "error"}
    states = {
        sample.labels["sleep_state"]: sample.value for sample in found.families["vllm:engine_sleep_state"].samples
    }
    assert states == {"awake": 1, "weights_offloaded": 0, "discard_all": 0}


@pytest.mark.essential
def test_a_request_is_counted_in_tokens_latencies_and_by_endpoint(in_process):
    async def run():
        async with in_process() as client:
            before = await scrape(client)
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
            assert (await client.post("/v1/completions", json={})).status_code == 400
            assert (await client.get("/nowhere")).status_code == 404
            return before, await scrape(client)

    before, after = asyncio.run(run())

    def added(name: str, **labels: str) -> float:
        return after.get(name, **labels) - before.get(name, **labels)

    assert added("vllm:prompt_tokens_total") == 5
    assert added("vllm:generation_tokens_total") == 4
    assert added("vllm:request_success_total", finished_reason="length") == 1
    assert added("vllm:inter_token_latency_seconds_count") == 3
    assert added("vllm:inter_token_latency_seconds_bucket", le="+Inf") == 3
    assert added("vllm:iteration_tokens_total_sum") == 9
    assert added("vllm:request_prompt_tokens_sum") == 5
    assert added("vllm:request_params_max_tokens_sum") == 4
    for phase in ("queue", "prefill", "inference", "decode"):
        assert added(f"vllm:request_{phase}_time_seconds_count") == 1
    for name in ("vllm:time_to_first_token", "vllm:e2e_request_latency", "vllm:request_time_per_output_token"):
        assert added(f"{name}_seconds_count") == 1
    total = added("vllm:e2e_request_latency_seconds_sum")
    assert added("vllm:time_to_first_token_seconds_sum") <= total
    assert added("vllm_mp:http_requests_total", endpoint="/v1/completions", status="200") == 1
    assert added("vllm_mp:http_requests_total", endpoint="/v1/completions", status="400") == 1
    assert added("vllm_mp:http_requests_total", endpoint="other", status="404") == 1
    assert added("vllm_mp:http_request_duration_seconds_count", endpoint="/v1/completions") == 2


def test_refused_requests_are_counted_as_rejected(in_process):
    async def run():
        async with in_process(max_body_bytes=10) as client:
            assert (await client.post("/v1/completions", json=BODY)).status_code == 413
            return await scrape(client)

    assert asyncio.run(run()).get("vllm_mp:rejected_requests_total", status="413") == 1


def test_metrics_of_a_core_that_does_not_answer_are_the_last_known(tmp_path):
    async def run(engine: AsyncLLM) -> tuple[Scrape, Scrape, float]:
        async with client_of(build_app(engine, ServerOptions())) as client:
            pid = (await engine.core_status())["pid"]
            await client.post("/v1/completions", json=BODY)
            before = await scrape(client)
            os.kill(pid, signal.SIGSTOP)
            try:
                start = time.monotonic()
                after = await scrape(client)
                return before, after, time.monotonic() - start
            finally:
                os.kill(pid, signal.SIGCONT)

    with replay_core(tmp_path) as address:
        engine = AsyncLLM.connect(address)
        try:
            before, after, seconds = asyncio.run(run(engine))
        finally:
            engine.shutdown()
    for name in ("vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:generation_tokens_total"):
        assert after.families[name.removesuffix("_total")].samples
        assert after.get(name) == before.get(name)
    assert seconds < 10, "it does not wait for the core"


def test_a_core_that_is_gone_for_good_still_has_metrics(tmp_path):
    async def run(engine: AsyncLLM) -> Scrape:
        async with client_of(build_app(engine, ServerOptions())) as client:
            await client.post("/v1/completions", json=BODY)
            engine.shutdown()
            return await scrape(client)

    with replay_core(tmp_path) as address:
        assert asyncio.run(run(AsyncLLM.connect(address))).get("vllm:generation_tokens_total") == 4


def test_each_server_process_shows_the_sum_of_all(replay_address, tmp_path):
    async def run(engines: list[AsyncLLM]) -> list[Scrape]:
        clients = []
        for number, engine in enumerate(engines):
            clients.append(client_of(build_app(engine, ServerOptions())))
            engine.stats.share(tmp_path, f"front-{number}")
        for client in clients:
            await client.post("/v1/completions", json=BODY)
        return [await scrape(client) for client in clients]

    engines = [AsyncLLM.connect(replay_address) for _ in range(2)]
    try:
        scrapes = asyncio.run(run(engines))
    finally:
        for engine in engines:
            engine.shutdown()
    for found in scrapes:
        assert found.get("vllm:generation_tokens_total") == 8
        assert found.get("vllm:e2e_request_latency_seconds_count") == 2
        assert found.get("vllm_mp:http_requests_total", endpoint="/v1/completions") == 2


def test_a_killed_core_is_counted_with_its_cause_and_the_recovery(server):
    before = scraped(server.url)
    body = {"prompt": "Once upon a time", "max_tokens": 120, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        httpx.Request("POST", server.url, json=body).content,
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        response.readline()
        os.kill(server.core_pid(), signal.SIGKILL)
        assert b"[DONE]" in response.read()
    after = scraped(server.url)

    def added(name: str, **labels: str) -> float:
        return after.get(name, **labels) - before.get(name, **labels)

    assert added("vllm_mp:core_restarts_total", cause="signal") == 1
    assert added("vllm_mp:recovered_requests_total") == 1
    assert added("vllm_mp:recovery_time_seconds_count") == 1
    assert 0 < added("vllm_mp:recovery_time_seconds_sum") < 60
    assert added("vllm_mp:core_incarnation") == 1
    assert added("vllm:request_success_total", finished_reason="length") == 1
    assert after.get("vllm_mp:event_loop_lag_seconds_count") > 0
