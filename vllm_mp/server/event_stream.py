"""A response of server-sent events."""

import contextlib
from collections.abc import AsyncGenerator

from starlette.datastructures import MutableHeaders
from starlette.types import Receive, Scope, Send

from vllm_mp.server.errors import ApiError

_DONE = b"data: [DONE]\n\n"


class EventStream:
    """Sends events as they come, in the task of the request.

    The response starts with the first event: an error before it becomes a response with its own status. While the
    client is slow, `send` waits, and the tokens that arrive meanwhile merge into the next event.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        """`events` yields one or more whole events at a time, each with its "data: " and its blank line."""
        self.headers = MutableHeaders(
            {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
        )
        self.has_started = False
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._events):
            async for events in self._events:
                if not self.has_started:
                    self.has_started = True
                    await send({"type": "http.response.start", "status": 200, "headers": self.headers.raw})
                await send({"type": "http.response.body", "body": events, "more_body": True})
        await send({"type": "http.response.body", "body": _DONE})

    async def fail(self, error: ApiError, send: Send) -> None:
        """End a stream that has started with an event that says what went wrong."""
        await send({"type": "http.response.body", "body": event(error.body()) + _DONE})


def event(data: bytes) -> bytes:
    """Return the event that carries the JSON `data`."""
    return b"data: %b\n\n" % data
