"""A load of streamed completions that costs the client little, so that the server is what is measured."""

import asyncio
import json
import re
from typing import NamedTuple
from urllib.parse import urlsplit

_EVENT = b"data: "
_LIMIT_S = 300.0


class StreamCounts(NamedTuple):
    """What a load received."""

    tokens: int
    """Output tokens, as the servers' usage says."""
    events: int
    """Events that carry output; fewer than tokens if the server merged some."""
    num_bytes: int


class _Answer(asyncio.Protocol):
    """The bytes of a response on a connection of its own, which the server closes at the end."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self.complete: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self._chunks.append(data)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.complete.done():
            self.complete.set_result(b"".join(self._chunks))


async def stream_load(url: str, model: str, streams: int, output_len: int) -> StreamCounts:
    """Stream `streams` completions of `output_len` tokens at a time, and count what arrives.

    Raises RuntimeError if a response is not a complete stream, and ValueError for a URL without host or port.
    """
    host, port = urlsplit(url).hostname, urlsplit(url).port
    if host is None or port is None:
        raise ValueError(f"url={url!r} must name a host and a port")
    fields = {"model": model, "prompt": "Once upon a time", "max_tokens": output_len, "ignore_eos": True}
    fields |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body

    async def stream() -> StreamCounts:
        transport, answer = await asyncio.get_running_loop().create_connection(_Answer, host, port)
        transport.write(request)
        return _count(await asyncio.wait_for(answer.complete, _LIMIT_S))

    counts = await asyncio.gather(*(stream() for _ in range(streams)))
    return StreamCounts(*map(sum, zip(*counts, strict=True)))


def _count(response: bytes) -> StreamCounts:
    usage = re.search(rb'"completion_tokens":\s*(\d+)', response)
    if not response.startswith(b"HTTP/1.1 200") or b"data: [DONE]" not in response or usage is None:
        raise RuntimeError(f"the response is not a complete stream: {response[:500]!r} … {response[-500:]!r}")
    # The last two events are the usage and the end.
    return StreamCounts(int(usage[1]), response.count(_EVENT) - 2, len(response))
