"""Traces of what needs a real core: requests that fail or survive its death, and vectors."""

import asyncio

import httpx
import pytest
from support.otlp_collector import attributes_of, running_collector

from vllm_mp import EngineGenerateError, SamplingParams
from vllm_mp.server.app import build_app
from vllm_mp.server.http.options import ServerOptions
from vllm_mp.testing.engines import answer, running_engine

pytestmark = pytest.mark.usefixtures("forked_cores")

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)
TRACE = "0af7651916cd43dd8448eb211c80319c"
HEADERS = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
FAULTS = "kill@request=recovered,position=2,once;nan@request=failed"


@pytest.fixture(scope="module")
def spans(small_model):
    """The spans of the requests "failed", "recovered" and "vector", and of a request for an embedding over HTTP."""

    async def run(engine):
        with pytest.raises(EngineGenerateError):
            await answer(engine, "Hello", PARAMS, "failed")
        await answer(engine, "Hello", PARAMS, "recovered")
        async for _ in engine.encode("Hello", request_id="vector", trace_headers=HEADERS):
            pass
        transport = httpx.ASGITransport(build_app(engine, ServerOptions()))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            response = await client.post("/v1/embeddings", json={"input": "Hello"}, headers=HEADERS)
            assert response.status_code == 200, response.text

    with running_collector() as collector:
        with running_engine(small_model, fault_injection=FAULTS, otlp_traces_endpoint=collector.url) as engine:
            asyncio.run(run(engine))
        yield collector


def by_id(collector, request_id):
    (span,) = [span for span in collector.requests() if attributes_of(span)["gen_ai.request.id"] == request_id]
    return span


def test_a_failed_request_has_a_span_with_the_error(spans):
    failed = by_id(spans, "failed")
    assert failed.status.code == 2
    assert "not finite" in failed.status.message
    assert attributes_of(failed)["gen_ai.response.finish_reasons"] == ["error"]


def test_a_request_that_survives_the_death_of_a_core_has_one_span(spans):
    recovered = by_id(spans, "recovered")
    assert recovered.status.code == 0
    assert attributes_of(recovered)["vllm_mp.recoveries"] == 1
    assert attributes_of(recovered)["gen_ai.usage.completion_tokens"] == 4
    assert [phase.name for phase in spans.phases_of(recovered)] == ["tokenize", "queue", "prefill", "decode"]


def test_requests_for_vectors_continue_the_trace_of_their_caller(spans):
    of_caller = [span for span in spans.requests() if span.trace_id.hex() == TRACE]
    assert len(of_caller) == 2, "one from the call, one from HTTP"
    assert by_id(spans, "vector") in of_caller
