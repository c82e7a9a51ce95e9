"""Traces of requests, as a collector of OpenTelemetry receives them over HTTP."""

import asyncio
import itertools
import sys
from collections.abc import Iterator

import httpx
import pytest
from support.otlp_collector import Collector, attributes_of, running_collector

from vllm_mp import AsyncLLM, SamplingParams
from vllm_mp.client.stats import tracing
from vllm_mp.client.stats.tracing import RequestTracer, check_trace_headers, trace_url
from vllm_mp.server.app import build_app
from vllm_mp.server.http.options import ServerOptions

pytestmark = pytest.mark.extended  # needs OpenTelemetry
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
PHASES = ["tokenize", "queue", "prefill", "decode"]
PROMPT = [1, 2, 3, 4, 5]
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.5)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with running_collector() as collector:
        yield collector


@pytest.fixture
def traced(replay_address, collector) -> Iterator[AsyncLLM]:
    """An engine that sends traces to `collector`; its `shutdown` sends what waits."""
    engine = AsyncLLM.connect(replay_address, otlp_traces_endpoint=collector.url)
    yield engine
    engine.shutdown()


async def consume(stream) -> None:
    async for _ in stream:
        pass


def test_a_request_has_a_span_with_its_phases(traced, collector):
    async def run() -> None:
        assert await traced.is_tracing_enabled()
        await consume(traced.generate({"prompt_token_ids": PROMPT}, PARAMS, "one"))
        traced.shutdown()

    asyncio.run(run())
    (request,) = collector.requests()
    assert not request.parent_span_id
    assert collector.services == {"vllm_mp"}
    attributes = attributes_of(request)
    known = {
        "gen_ai.request.id": "one",
        "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.usage.prompt_tokens": 5,
        "gen_ai.usage.completion_tokens": 4,
        "gen_ai.response.model": traced.model_config.served_model_name,
        "gen_ai.response.finish_reasons": ["length"],
        "vllm_mp.recoveries": 0,
    }
    assert known.items() <= attributes.items()
    first, total = attributes["gen_ai.latency.time_to_first_token"], attributes["gen_ai.latency.e2e"]
    assert 0 < first <= total
    assert total == pytest.approx((request.end_time_unix_nano - request.start_time_unix_nano) / 1e9, abs=1e-6)
    assert attributes["gen_ai.latency.time_in_queue"] >= 0
    phases = collector.phases_of(request)
    assert [phase.name for phase in phases] == PHASES
    assert phases[0].start_time_unix_nano == request.start_time_unix_nano
    assert phases[-1].end_time_unix_nano == request.end_time_unix_nano
    for phase, following in itertools.pairwise(phases):
        assert phase.start_time_unix_nano <= phase.end_time_unix_nano == following.start_time_unix_nano


def test_a_request_continues_the_trace_of_its_caller(traced, collector):
    async def run() -> None:
        await consume(
            traced.generate({"prompt_token_ids": PROMPT}, PARAMS, trace_headers={"Traceparent": TRACEPARENT, "a": "b"})
        )
        app = build_app(traced, ServerOptions())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            body = {"prompt": PROMPT, "max_tokens": 2}
            headers = {"traceparent": TRACEPARENT}
            assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200
            unsampled = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
            assert (await client.post("/v1/completions", json=body, headers=unsampled)).status_code == 200
            invalid = {"traceparent": "garbage"}
            assert (await client.post("/v1/completions", json=body, headers=invalid)).status_code == 200
        traced.shutdown()

    asyncio.run(run())
    of_callers = [span for span in collector.requests() if span.parent_span_id.hex() == PARENT]
    assert [span.trace_id.hex() for span in of_callers] == [TRACE] * 2, "one from the call, one from HTTP"
    assert len(collector.requests()) == 3, "the request with an invalid header begins a trace of its own"


def test_every_way_to_generate_continues_the_trace(traced, collector):
    headers, prompt = {"traceparent": TRACEPARENT}, {"prompt_token_ids": PROMPT}

    async def run() -> None:
        await consume(await traced.add_request("add_request", prompt, PARAMS, trace_headers=headers))
        async with traced.stream_group() as group:
            await group.add(prompt, PARAMS, "stream_group", trace_headers=headers)
            await consume(group)
        app = build_app(traced, ServerOptions())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            bodies = {
                "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 2},
                "/v1/responses": {"input": "a", "max_output_tokens": 16},
            }
            for path, body in bodies.items():
                response = await client.post(path, json=body, headers=headers)
                assert response.status_code == 200, response.text
        traced.shutdown()

    asyncio.run(run())
    assert [span.trace_id.hex() for span in collector.requests()] == [TRACE] * 4
    ids = [attributes_of(span)["gen_ai.request.id"] for span in collector.requests()]
    assert ids[:2] == ["add_request", "stream_group"]


def test_spans_of_aborted_requests_end_with_an_error_status(traced, collector):
    async def run() -> None:
        await traced.pause_generation("keep")
        stream = await traced.add_request("gone", {"prompt_token_ids": PROMPT}, PARAMS)
        await traced.abort("gone")
        await consume(stream)
        await traced.resume_generation()
        traced.shutdown()

    asyncio.run(run())
    (request,) = collector.requests()
    assert (request.status.code, request.status.message) == (2, "the request was aborted")
    assert attributes_of(request)["gen_ai.response.finish_reasons"] == ["abort"]
    assert [phase.name for phase in collector.phases_of(request)] == ["tokenize", "queue"]


def test_a_collector_that_cannot_be_reached_fails_no_request(replay_address, collector):
    collector.server.socket.close()
    engine = AsyncLLM.connect(replay_address, otlp_traces_endpoint=collector.url)
    try:
        asyncio.run(consume(engine.generate({"prompt_token_ids": PROMPT}, PARAMS)))
    finally:
        engine.shutdown()


def test_a_collector_that_does_not_answer_delays_neither_requests_nor_the_end(traced, collector, monkeypatch):
    monkeypatch.setattr(tracing, "_CLOSE_TIMEOUT_S", 0.1)
    collector.answers.clear()

    async def run() -> None:
        for _ in range(3):
            await consume(traced.generate({"prompt_token_ids": PROMPT}, PARAMS))

    asyncio.run(run())
    traced.shutdown()
    assert not collector.answers.is_set(), "the engine has ended before the collector has answered"


def test_the_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ImportError, match=r"pip install opentelemetry-sdk"):
        RequestTracer("http://localhost:4318", "model")


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://localhost:4317", "http://", "file:///etc/passwd"])
def test_an_endpoint_that_is_no_http_url_is_refused(endpoint):
    with pytest.raises(ValueError, match="otlp_traces_endpoint must be a URL"):
        trace_url(endpoint)


def test_the_path_of_an_endpoint_is_added_if_there_is_none():
    assert trace_url("http://a:4318") == trace_url("http://a:4318/") == "http://a:4318/v1/traces"
    assert trace_url("https://a/otlp/v1/traces") == "https://a/otlp/v1/traces"


def test_only_headers_of_trace_context_are_kept():
    assert check_trace_headers({"TraceParent": "x", "cookie": "y"}) == {"traceparent": "x"}
    for wrong in ({"traceparent": 1}, ["traceparent"], "traceparent"):
        with pytest.raises(TypeError, match="trace_headers must be a mapping"):
            check_trace_headers(wrong)


def test_trace_headers_without_a_collector_are_warned_of_once(replay_engine, caplog):
    async def run() -> None:
        assert not await replay_engine.is_tracing_enabled()
        for _ in range(2):
            headers = {"traceparent": TRACEPARENT}
            await consume(replay_engine.generate({"prompt_token_ids": PROMPT}, PARAMS, trace_headers=headers))

    asyncio.run(run())
    assert caplog.text.count("trace_headers have no effect") == 1
