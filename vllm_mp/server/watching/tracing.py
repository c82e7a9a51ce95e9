"""The trace that an HTTP request belongs to, as W3C Trace Context carries it."""

from vllm_mp.client.stats.tracing import TRACE_HEADERS
from vllm_mp.server.http.endpoint import Call


def trace_headers(call: Call) -> dict[str, str]:
    """Return the headers that name the caller's trace, for the engine; none if the engine sends no traces."""
    if not call.server.engine.is_tracing:
        return {}
    headers = call.http.headers
    return {name: headers[name] for name in TRACE_HEADERS if name in headers}
