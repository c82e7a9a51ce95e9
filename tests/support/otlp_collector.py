"""A collector of OpenTelemetry's traces."""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Collector:
    """An OTLP/HTTP collector that keeps the spans it is sent."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        spans = self.spans = []
        self.services: set[str] = set()
        services = self.services
        self.answers = threading.Event()
        """Set unless a test wants the collector to leave its clients without an answer."""
        self.answers.set()
        answers = self.answers

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["Content-Length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    services.update(attributes_of(resource.resource)["service.name"].split())
                    spans.extend(span for scope in resource.scope_spans for span in scope.spans)
                answers.wait()
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def requests(self) -> list[Any]:
        return [span for span in self.spans if span.name == "llm_request"]

    def phases_of(self, request: Any) -> list[Any]:
        return [span for span in self.spans if span.parent_span_id == request.span_id]


def attributes_of(thing: Any) -> dict[str, Any]:
    values = {}
    for attribute in thing.attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind)
        values[attribute.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return values


@contextlib.contextmanager
def running_collector() -> Iterator[Collector]:
    """Run a collector at `Collector.url`."""
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield collector
    finally:
        collector.answers.set()
        collector.server.shutdown()
        collector.server.server_close()
        thread.join()
