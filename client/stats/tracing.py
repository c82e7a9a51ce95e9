"""Traces of requests: a span for each request that ends, with its phases, sent to an OpenTelemetry collector."""

import functools
import importlib.util
import os
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from vllm_mp.client.stats import FinishedRequest
from vllm_mp.requests.sampling_params import SamplingParams

_PHASES = ("tokenize", "queue", "prefill", "decode")
_MAX_QUEUED_SPANS = 8192
"""Spans that wait to be sent; more are dropped. A request has up to 5."""
_CLOSE_TIMEOUT_S = 2.0
"""Time that spans get to be sent when the engine is shut down."""
TRACE_HEADERS = ("traceparent", "tracestate")
"""The headers of W3C Trace Context."""


class RequestTracer:
    """Makes spans of finished requests; a listener of `EngineStats`.

    A thread of its own sends them in batches over OTLP/HTTP. A collector that is slow or gone costs spans, never time.
    A request whose caller sent a `traceparent` continues the caller's trace, and is left out if that is not sampled.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        """`endpoint` is the URL of a collector; without a path, /v1/traces is added. `model` is the served name.

        Raises ValueError if the URL is not an http or https URL, and ImportError, naming the packages, without
        OpenTelemetry.
        """
        url = trace_url(endpoint)
        if importlib.util.find_spec("opentelemetry") is None or importlib.util.find_spec("opentelemetry.sdk") is None:
            raise ImportError(
                f"otlp_traces_endpoint={endpoint!r} needs OpenTelemetry; install it with "
                "`pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http`"
            )
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._model = model
        self._exporter: Any = OTLPSpanExporter(endpoint=url)  # `shutdown` has no types
        service = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "vllm_mp")})
        self._provider = TracerProvider(resource=service, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter, max_queue_size=_MAX_QUEUED_SPANS))
        self._tracer = self._provider.get_tracer("vllm_mp")
        self._read_parent = TraceContextTextMapPropagator().extract
        self._set_span_in_context = set_span_in_context
        self._server_kind = SpanKind.SERVER
        self._failed = functools.partial(Status, StatusCode.ERROR)

    def __call__(self, request: FinishedRequest) -> None:
        """Make the spans of a request that has ended."""
        parent = self._read_parent(dict(request.trace_headers)) if request.trace_headers else None
        span = self._tracer.start_span(
            "llm_request", parent, self._server_kind, start_time=_nanoseconds(request.arrival_time)
        )
        if span.is_recording():
            span.set_attributes(self._attributes(request))
            if request.finish_reason == "error":
                span.set_status(self._failed(request.error or "the request failed"))
            elif request.finish_reason == "abort":
                span.set_status(self._failed("the request was aborted"))
            context = self._set_span_in_context(span)
            for name, start, end in _phases(request):
                phase = self._tracer.start_span(name, context, start_time=_nanoseconds(start))
                phase.end(_nanoseconds(end))
        span.end(_nanoseconds(request.end_time))

    def close(self) -> None:
        """Send the spans that wait, for at most 2 seconds, and end the thread."""
        closing = threading.Thread(target=self._provider.shutdown, name="trace-close", daemon=True)
        closing.start()
        closing.join(_CLOSE_TIMEOUT_S)
        if closing.is_alive():
            self._exporter.shutdown()

    def _attributes(self, request: FinishedRequest) -> dict[str, Any]:
        """Return the attributes of the request's span, with vLLM's names and the conventions for generative AI."""
        params = request.params
        attributes: dict[str, Any] = {
            "gen_ai.response.model": self._model,
            "gen_ai.request.id": request.request_id,
            "gen_ai.request.n": request.n,
            "gen_ai.response.finish_reasons": [request.finish_reason],
            "gen_ai.usage.prompt_tokens": request.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": request.num_output_tokens,
            "gen_ai.usage.num_sequences": request.n,
            "gen_ai.latency.e2e": request.end_time - request.arrival_time,
            "vllm_mp.usage.cached_tokens": request.num_cached_tokens,
            "vllm_mp.recoveries": request.num_recoveries,
        }
        if isinstance(params, SamplingParams):
            attributes["gen_ai.request.temperature"] = params.temperature
            attributes["gen_ai.request.top_p"] = params.top_p
            if params.max_tokens is not None:
                attributes["gen_ai.request.max_tokens"] = params.max_tokens
        scheduled, first = request.scheduled_time, request.first_token_time
        if request.queue_s is not None and scheduled is not None and first is not None:
            attributes |= {
                "gen_ai.latency.time_in_queue": request.queue_s,
                "gen_ai.latency.time_to_first_token": first - request.arrival_time,
                "gen_ai.latency.time_in_model_prefill": first - scheduled,
                "gen_ai.latency.time_in_model_decode": request.end_time - first,
                "gen_ai.latency.time_in_model_inference": request.end_time - scheduled,
            }
        return attributes


def check_trace_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    """Return the headers of W3C Trace Context among `headers`, in lower case. Raises TypeError unless all are str."""
    if not headers:
        return {}
    if not isinstance(headers, Mapping) or not all(isinstance(text, str) for pair in headers.items() for text in pair):
        raise TypeError(f"trace_headers must be a mapping of str to str, got {headers!r}")
    return {name.lower(): value for name, value in headers.items() if name.lower() in TRACE_HEADERS}


def trace_url(endpoint: str) -> str:
    """Return the URL to which traces are sent. Raises ValueError if `endpoint` is not an http or https URL."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            f"otlp_traces_endpoint must be a URL such as http://localhost:4318/v1/traces (OTLP over HTTP), got "
            f"{endpoint!r}"
        )
    return endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"


def _phases(request: FinishedRequest) -> list[tuple[str, float, float]]:
    """Return name, begin and end of each phase that the request reached."""
    begins = [request.arrival_time, request.sent_time, request.scheduled_time, request.first_token_time]
    reached = [begin for begin in begins if begin is not None]
    return list(zip(_PHASES, reached, [*reached[1:], request.end_time], strict=False))


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
