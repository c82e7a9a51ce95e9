"""The protocol of a connection: uvicorn's, with limits on what a client may send and how long it may take."""

import asyncio
import enum
import functools
import http
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from vllm_mp.server.http.errors import ApiError
from vllm_mp.server.http.options import ServerOptions

_MAX_HEADERS = 128
_MAX_PIPELINED = 16
"""Requests of a connection that may wait for the responses to earlier requests."""
_DISCARD_S = 5.0
"""Time that a client gets to finish or stop sending a body to which it has received the response already."""
_LINGER_S = 1.0
"""Time that a refused client gets to read why. Closing at once would reset the connection while the client sends."""
_BODY_MARGIN_S = 1.0
"""The endpoint that reads a body has this much time to refuse a slow body before the connection is closed."""


class ConnectionLimits(NamedTuple):
    """What a client may send on a connection, and how long it may take. Times are in seconds."""

    max_connections: int
    max_header_bytes: int
    header_timeout: float
    body_timeout: float

    @classmethod
    def of(cls, options: ServerOptions, max_connections: int) -> "ConnectionLimits":
        """Return the limits of `options`, with at most `max_connections`."""
        count = min(options.max_connections, max_connections)
        return cls(count, options.max_header_bytes, options.header_timeout, options.body_timeout)


WRITE_NOW = "vllm_mp.write_now"
"""The ASGI extension that holds a `WriteNow` for the response."""
WriteNow = Callable[[bytes], bool]
"""Writes a part of a body that is streamed, which is not empty, without waiting. Returns False, and writes nothing, if
`send` is needed: before the response has started, after its end, and while the client is slow."""


class _Reading(enum.Enum):
    """The part of a request that the client is to send next."""

    NOTHING = enum.auto()
    """No request has begun, or a response must end first."""
    HEAD = enum.auto()
    """The request line and the headers."""
    BODY = enum.auto()
    REFUSED = enum.auto()
    """Whatever comes is discarded: the connection is about to close."""


class _BodyAfterUpgrade:
    """The parser of httptools, which also reads the body of a request that asks for another protocol.

    Some HTTP clients do so in each request (`Upgrade: h2c`), and httptools takes their headers for the end of the
    request. This server changes to no other protocol. So the parser is given a second head, which says only
    what form the body has, and goes on with the body.
    """

    def __init__(self, parser: Any, form_of_body: Callable[[], bytes]) -> None:
        """`form_of_body` returns the headers of the latest request that say where its body ends; empty: it has none."""
        self._parser = parser
        self._form_of_body = form_of_body
        self.is_at_second_head = False
        """What the parser reports now is of the second head."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    @property
    def is_before_body(self) -> bool:
        """Whether the request that the parser reports as complete has a body that the parser has not read."""
        return self._parser.should_upgrade() and self._form_of_body() != b""

    def feed_data(self, data: bytes) -> None:
        """Parse `data`; raises `httptools.HttpParserError`."""
        rest = memoryview(data)
        while True:
            try:
                self._parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as stop:
                [num_parsed] = stop.args
                rest = rest[num_parsed:]
            if form := self._form_of_body():
                self.is_at_second_head = True
                try:
                    self._parser.feed_data(b"POST / HTTP/1.1\r\n" + form + b"\r\n")
                finally:
                    self.is_at_second_head = False
            if not rest:
                return


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection. A client that exceeds a limit gets a status if possible, and its connection is closed."""

    parser: _BodyAfterUpgrade  # type: ignore[assignment]

    def __init__(self, *args: Any, limits: ConnectionLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _BodyAfterUpgrade(self.parser, self._form_of_body)
        self._limits = limits
        self._reading = _Reading.NOTHING
        self._head_bytes = 0
        """Bytes of an incomplete head, except those that arrived together with its first byte."""
        self._timer: asyncio.TimerHandle | None = None
        """Runs while the client is to send something."""
        self._refusal: ApiError | None = None
        """Why the parser was told to stop."""
        self._running: RequestResponseCycle | None = None
        """The latest request that was given to the application; `cycle` may be one that waits behind it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._refuse(
                ApiError(
                    503,
                    f"too many connections: the limit is {self._limits.max_connections}; connect again later",
                    type="server_error",
                    code="too_many_connections",
                )
            )
        else:
            self._start_timer(self._limits.header_timeout, self._on_slow_head)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        running = self._running
        if running is not None and not running.response_complete:
            # uvicorn tells only the newest request of a pipeline.
            running.disconnected = True
            running.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._reading is _Reading.REFUSED:
            return
        is_more_of_head = self._reading is _Reading.HEAD
        super().data_received(data)
        if self.transport.is_closing():
            return
        if is_more_of_head and self._reading is _Reading.HEAD:
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.max_header_bytes:
                self._refuse(self._too_large())
        elif self._reading is _Reading.NOTHING and self._timer is None and not self._is_responding():
            # Bytes between two requests must not keep a connection open for ever.
            self._start_timer(self._limits.header_timeout, self._on_slow_head)

    def on_message_begin(self) -> None:
        if self.parser.is_at_second_head:
            return
        super().on_message_begin()
        self._reading = _Reading.HEAD
        self._head_bytes = 0
        self._start_timer(self._limits.header_timeout, self._on_slow_head)

    def on_url(self, url: bytes) -> None:
        if not self.parser.is_at_second_head:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.parser.is_at_second_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.is_at_second_head:
            return
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if num_bytes > self._limits.max_header_bytes or len(self.headers) > _MAX_HEADERS:
            self._refusal = self._too_large()
            raise ValueError(self._refusal.message)  # stops the parser
        must_wait = self._is_responding()
        super().on_headers_complete()
        scope = cast("dict[str, Any]", self.scope)
        scope.setdefault("extensions", {})[WRITE_NOW] = functools.partial(_write_now, self.cycle)
        if must_wait:
            # A connection that is not read does not notice that the client hangs up. A large body still stops reading.
            self.flow.resume_reading()
        else:
            self._running = self.cycle
        self._reading = _Reading.BODY
        self._start_timer(self._limits.body_timeout + _BODY_MARGIN_S, self._on_slow_body)
        if len(self.pipeline) > _MAX_PIPELINED:
            self.transport.abort()

    def on_message_complete(self) -> None:
        if self.parser.is_before_body:
            return
        self._reading = _Reading.NOTHING
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._running = self.pipeline[-1][0]
        super().on_response_complete()
        if self._reading is _Reading.BODY and not self._is_responding():
            self._start_timer(_DISCARD_S, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser could not read."""
        malformed = ApiError(400, "the request is malformed HTTP; send HTTP/1.1", code="malformed_http")
        self._refuse(self._refusal or malformed)

    def _form_of_body(self) -> bytes:
        """Return the headers of the latest request that say where its body ends; empty if it has none."""
        if self.scope["method"] == "CONNECT":
            return b""
        names = (b"content-length", b"transfer-encoding")
        return b"".join(b"%b: %b\r\n" % header for header in self.headers if header[0] in names)

    def _refuse(self, error: ApiError) -> None:
        """Send `error` and close the connection; send nothing if it would land inside another response."""
        is_own_request = self._reading is _Reading.BODY and not self.pipeline and not self.cycle.response_started
        self._reading = _Reading.REFUSED
        self._unset_keepalive_if_required()
        if self._is_responding():
            if not is_own_request:
                self.transport.abort()
                return
            # The endpoint waits for the rest of this body; for it, the client has hung up.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = error.body()
        head = (
            f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._start_timer(_LINGER_S, self.transport.abort)
        else:
            self.transport.close()

    def _too_large(self) -> ApiError:
        limit = self._limits.max_header_bytes
        return ApiError(
            431,
            f"the request's line and headers are too large: the limit is {limit} bytes and {_MAX_HEADERS} headers",
            code="headers_too_large",
        )

    def _on_slow_head(self) -> None:
        self._timer = None
        if self._is_responding():  # to an earlier request
            self._start_timer(self._limits.header_timeout, self._on_slow_head)
        elif self._reading is _Reading.HEAD:
            limit = self._limits.header_timeout
            self._refuse(
                ApiError(408, f"the headers did not arrive within {limit:g} s; send them at once", code="timeout")
            )
        else:
            self.transport.close()

    def _on_slow_body(self) -> None:
        self._timer = None
        if self.flow.read_paused:  # it is this side that does not read
            self._start_timer(self._limits.body_timeout, self._on_slow_body)
        else:
            self.transport.abort()

    def _is_responding(self) -> bool:
        """Return whether a request of this connection has not been answered completely."""
        return self.cycle is not None and not self.cycle.response_complete

    def _start_timer(self, seconds: float, call: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, call)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _write_now(cycle: RequestResponseCycle, part: bytes) -> bool:
    if (
        not cycle.response_started
        or cycle.response_complete
        or cycle.disconnected
        or not cycle.chunked_encoding
        or cycle.flow.write_paused
    ):
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))
    return True
