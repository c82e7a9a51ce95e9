"""A response of server-sent events."""

import contextlib
import secrets
from collections.abc import AsyncGenerator

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.types import Receive, Scope, Send

from vllm_mp.server.http.errors import ApiError

_DONE = b"data: [DONE]\n\n"
TEXT_MARK = secrets.token_hex(16)
"""Stands for the text in the struct that a `TextEvent` is made from."""
_encode = msgspec.json.Encoder().encode


class EventStream:
    """Sends events as they come, in the task of the request.

    The response starts with the first event: an error before it becomes a response with its own status. While the
    client is slow, `send` waits, and the tokens that arrive meanwhile merge into the next event.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], end: bytes = _DONE) -> None:
        """`events` yields one or more whole events at a time; the last event is `end`."""
        self.headers = MutableHeaders(
            {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
        )
        self.has_started = False
        self._events = events
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._events):
            async for events in self._events:
                if not self.has_started:
                    await self._start(send)
                await send({"type": "http.response.body", "body": events, "more_body": True})
        if not self.has_started:
            await self._start(send)
        await send({"type": "http.response.body", "body": self._end})

    async def fail(self, error: ApiError, send: Send) -> None:
        """End a stream that has started with an event that says what went wrong."""
        await send({"type": "http.response.body", "body": encode_event(error.data()) + self._end})

    async def _start(self, send: Send) -> None:
        self.has_started = True
        await send({"type": "http.response.start", "status": 200, "headers": self.headers.raw})


class TextEvent:
    """An event in which only the text changes, like most events of a stream: the rest is encoded once."""

    def __init__(self, template: msgspec.Struct) -> None:
        """`template` is the data of the event, with `TEXT_MARK` where the text goes."""
        self._before, self._after = encode_event(template).split(b'"%b"' % TEXT_MARK.encode())

    def encode(self, text: str) -> bytes:
        """Return the event with `text`: the same bytes as `encode_event` of the whole data."""
        return self._before + _encode(text) + self._after


def encode_event(data: msgspec.Struct) -> bytes:
    """Return the event that carries `data`."""
    return b"data: %b\n\n" % _encode(data)
