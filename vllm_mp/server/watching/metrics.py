"""The endpoint /metrics: the statistics in Prometheus' text format, with vLLM's names for what means the same."""

import dataclasses
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vllm_mp.client.async_llm import AsyncLLM
from vllm_mp.client.stat_loggers.engine_metrics import EngineCollector, add_histogram
from vllm_mp.server.http.body import IgnoredFields
from vllm_mp.server.http.options import ServerOptions
from vllm_mp.server.http.security import HostGuard
from vllm_mp.server.http.state import ServerState
from vllm_mp.server.watching import health
from vllm_mp.server.watching.http_stats import HttpStats

_CORE_TIMEOUT_S = 1.0
"""Time that the core gets to say its load."""
_REJECTIONS = ("401", "403", "413", "429", "431", "503")
"""Statuses of requests that the server turns away before it works on them."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class HttpCollector(Collector):
    """Reads the counts of HTTP requests, of all server processes. What has not occurred has no sample."""

    def __init__(self, engine: AsyncLLM, stats: HttpStats, ignored: IgnoredFields) -> None:
        self._engine = engine
        self._stats = stats
        self._ignored = ignored

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        values = self._engine.stats.cells.total()
        requests = CounterMetricFamily(
            "vllm_mp:http_requests", "HTTP requests that have ended", labels=("endpoint", "status")
        )
        rejected = dict.fromkeys(_REJECTIONS, 0.0)
        duration = HistogramMetricFamily(
            "vllm_mp:http_request_duration_seconds",
            "Time from the head of an HTTP request to the end of its response",
            labels=("endpoint",),
        )
        for endpoint in self._stats.endpoints:
            counts = self._stats.requests[endpoint].read(values)
            for status, count in counts.items():
                if count:
                    requests.add_metric((endpoint, status), count)
                if status in rejected:
                    rejected[status] += count
            if any(counts.values()):
                add_histogram(duration, (endpoint,), self._stats.duration_s[endpoint], values)
        yield requests
        yield duration
        family = CounterMetricFamily(
            "vllm_mp:rejected_requests",
            "HTTP requests that were refused for lack of room or permission, by status",
            labels=("status",),
        )
        for status, count in rejected.items():
            family.add_metric((status,), count)
        yield family
        family = CounterMetricFamily(
            "vllm_mp:ignored_request_fields",
            "Fields of requests that the server did not know and ignored, by name",
            labels=("field",),
        )
        for name, count in self._ignored.counts.read(values).items():
            if count:
                family.add_metric((name,), count)
        yield family
        lag = HistogramMetricFamily(
            "vllm_mp:event_loop_lag_seconds", "How late the event loop of a server process calls what is due", labels=()
        )
        add_histogram(lag, (), self._stats.lag_s, values)
        yield lag


def metrics_registry(engine: AsyncLLM, stats: HttpStats, ignored: IgnoredFields) -> CollectorRegistry:
    """Return the registry with all metrics of the server."""
    registry = CollectorRegistry()
    engines = EngineCollector()
    engines.add(engine.readings)
    registry.register(engines)
    registry.register(HttpCollector(engine, stats, ignored))
    return registry


async def show_metrics(request: Request) -> Response:
    """Return all metrics; while the core does not answer, its load is what was last known."""
    server: ServerState = request.app.state.server
    await server.engine.read_core_load(_CORE_TIMEOUT_S)
    return Response(generate_latest(request.app.state.metrics), media_type=CONTENT_TYPE)


ROUTES = [Route("/metrics", show_metrics)]


def metrics_app(server_app: Starlette) -> Starlette:
    """Return the application of the listener that has metrics and probes of `server_app` alone, and asks for no key."""
    options: ServerOptions = server_app.state.server.options
    without_keys = dataclasses.replace(options, api_key=())
    app = Starlette(routes=[*ROUTES, *health.PROBE_ROUTES], middleware=[Middleware(HostGuard, options=without_keys)])
    app.state = server_app.state
    return app
