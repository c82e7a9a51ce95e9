"""What `AsyncLLM.generate` returns: the outputs of one request as an asynchronous generator."""

import asyncio
import types
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from vllm_mp.client.outputs import output_path
from vllm_mp.client.outputs.stream import RequestStream

_OBJECTS_PER_TURN = 64
"""Number of objects for log-probabilities that a consumer makes in a turn of the event loop: about 0.1 ms of work. All
consumers that `WakeUps` wakes in a turn may do so."""

Start = Callable[[], Awaitable["OutputIterator"]]
"""Sends a request."""
Attach = Callable[[], None]
"""Receives from the cores on the running event loop."""
Abandon = Callable[[RequestStream], None]
"""Aborts the request of a stream that has lost its consumer. May be called in any thread."""


class OutputIterator(AsyncGenerator[Any, None]):
    """The outputs of a request, which begins when the first output is awaited, unless it has begun already.

    Closing the iterator, dropping it and cancelling a task that waits in it abort the request. Another event loop may
    read on after the first has ended. It has the methods of an asynchronous generator but is none, because a generator
    within a generator costs more than the output itself.
    """

    __slots__ = ("__weakref__", "_abandon", "_attach", "_loop", "_start", "_stream")

    def __init__(
        self, attach: Attach, abandon: Abandon, start: Start | None, stream: RequestStream | None = None
    ) -> None:
        """Give either `start` or the `stream` of a request that has begun, on the running loop."""
        self._attach = attach
        self._abandon = abandon
        self._start = start
        self._stream = stream
        """The stream, until its last output is taken or the iterator is closed."""
        self._loop = asyncio._get_running_loop()
        """The event loop that receives the outputs."""

    def __aiter__(self) -> "OutputIterator":
        return self

    def __anext__(self) -> Awaitable[Any]:  # type: ignore[override]
        stream = self._stream
        if stream is None or asyncio._get_running_loop() is not self._loop:
            return self._next()
        return output_path.current.next_output(self, stream)

    async def asend(self, value: None) -> Any:
        """Return the next output; `value` has no effect."""
        return await self.__anext__()

    async def athrow(
        self,
        kind: type[BaseException] | BaseException,
        value: BaseException | object = None,
        traceback: types.TracebackType | None = None,
    ) -> Any:
        """Abort the request and raise the exception."""
        self._close()
        error = kind if isinstance(kind, BaseException) else value if isinstance(value, BaseException) else kind()
        raise error.with_traceback(traceback) if traceback is not None else error

    def detach(self) -> RequestStream:
        """Return the stream to another consumer; this iterator has no further outputs and does not abort the request.

        Raises ValueError if the request has not begun, or has ended.
        """
        stream, self._stream = self._stream, None
        if stream is None:
            raise ValueError("the iterator has no stream: its request has not begun, or it has ended")
        return stream

    async def aclose(self) -> None:
        """Abort the request, if it has not ended; there are no further outputs."""
        self._close()

    def __del__(self) -> None:
        self._close()

    async def _next(self) -> Any:
        """Return the next output; raise StopAsyncIteration if the iterator has ended."""
        stream = self._stream
        if stream is None:
            start, self._start = self._start, None
            if start is None:
                raise StopAsyncIteration
            stream = self._stream = (await start()).detach()
        try:
            while not stream.has_news():
                if (loop := asyncio.get_running_loop()) is not self._loop:
                    self._attach()
                    self._loop = loop
                await stream.arrival()
            if stream.has_logprobs:
                await stream.make_logprobs(_OBJECTS_PER_TURN, _OBJECTS_PER_TURN)
        except BaseException:
            self._close()
            raise
        return self._take_from(stream)

    def _take_from(self, stream: RequestStream) -> Any:
        """Return the output of a stream that has news; the iterator ends with its last output or its error."""
        try:
            output = stream.take()
        except BaseException:
            self._close()
            raise
        if output.finished:
            self._stream = None
        return output

    def _close(self) -> None:
        """Abort the request, if it has not ended; no-op after the first call."""
        self._start = None
        stream, self._stream = self._stream, None
        if stream is not None and not stream.is_over:
            self._abandon(stream)
