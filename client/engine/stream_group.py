"""Many requests with one consumer, which gets all outputs that are ready at a time."""

import asyncio
import types
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Self, cast

from vllm_mp.client.engine.input_processor import check_sampling_params
from vllm_mp.client.outputs import output_path
from vllm_mp.client.outputs.output_iterator import Abandon, Attach, OutputIterator
from vllm_mp.client.outputs.stream import ReadyStreams, RequestStream
from vllm_mp.client.prompts.prompt import PromptType
from vllm_mp.client.prompts.request import checked_request_id
from vllm_mp.errors import DuplicateRequestIdError
from vllm_mp.outputs import RequestFailure, RequestOutput
from vllm_mp.requests.sampling_params import SamplingParams

_OBJECTS_PER_TURN = 4096
"""Number of objects for log-probabilities that a group makes in a turn of the event loop: some milliseconds of work."""

Outputs = list[RequestOutput | RequestFailure]
"""What is new of the streams of a group."""


class StreamGroup:
    """The outputs of many requests as lists: one awaitable for all streams, where `generate` has one for each.

        async with llm.stream_group() as group:
            for prompt in prompts:
                await group.add(prompt, params)
            async for outputs in group:
                for output in outputs:
                    ...

    Each list has what is new: one `RequestOutput` for each stream with news, which is what `generate` would yield, or a
    `RequestFailure` for a stream that failed, which ends no other. The iteration ends when no request is left; requests
    that are added during it belong to it, and after it a new iteration may begin. Leaving the `async with` block,
    `aclose` and dropping the group abort the requests that have not ended. At most one consumer may iterate at a time.
    """

    def __init__(self, add: Callable[..., Awaitable[OutputIterator]], attach: Attach, abandon: Abandon) -> None:
        """`add` is `AsyncLLM.add_request`."""
        self._add = add
        self._attach = attach
        self._abandon = abandon
        self._streams: dict[str, RequestStream] = {}
        """By id: the streams whose last output has not been taken."""
        self._ready = ReadyStreams()
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop that receives the outputs."""
        self._num_being_added = 0
        self._has_logprobs = False
        """A stream has log-probabilities."""

    def __len__(self) -> int:
        """Return the number of requests whose last output has not been taken."""
        return len(self._streams)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._streams

    async def add(
        self,
        prompt: PromptType | None,
        sampling_params: SamplingParams | None = None,
        request_id: str | int | None = None,
        **arguments: Any,
    ) -> str:
        """Send a request and return its id.

        Takes the arguments of `AsyncLLM.generate`, and raises what it raises for a request that cannot run.
        """
        check_sampling_params(sampling_params)
        request_id = uuid.uuid4().hex if request_id is None else checked_request_id(request_id)
        if request_id in self._streams:
            raise DuplicateRequestIdError(
                f"request_id {request_id!r} is in use by a request of this group; choose another"
            )
        self._num_being_added += 1
        try:
            stream = (await self._add(request_id, prompt, sampling_params, **arguments)).detach()
        finally:
            self._num_being_added -= 1
            self._ready.wake()  # this may have been the last request that an iteration waits for
        self._streams[request_id] = stream
        self._has_logprobs = self._has_logprobs or stream.has_logprobs
        stream.group = self._ready
        if stream.has_news():
            stream.wake()
        return request_id

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Outputs:
        """Return the outputs that are ready, as soon as there is one.

        Raises StopAsyncIteration if no request is left.
        """
        while not self._is_over():
            if not len(self._ready):
                self._attach_to_loop()
                await self._ready.arrival()
            streams = self._ready.take()
            if self._has_logprobs:
                streams = await self._make_logprobs(streams)
            if outputs := self._take_from(streams):
                return outputs
        raise StopAsyncIteration

    async def relay(self, pass_on: Callable[[Outputs], Outputs]) -> Outputs:
        """Give outputs to `pass_on` while it takes all of them; return those that it left, or none after the last.

        `pass_on` returns the outputs that it left. It runs in the callback of the event loop that would wake this
        consumer, which saves waking a task for each output, so it must return soon and must not call this group.
        Cancelling the call loses no output. Raises what `pass_on` raises.
        """
        self._attach_to_loop()
        relay = _Relay(self, pass_on)
        relay.set_result(None)
        try:
            return await relay.left
        finally:
            self._ready.set_waiter(None)

    async def aclose(self) -> None:
        """Abort the requests that have not ended, and forget them."""
        self._close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self._close()

    def __del__(self) -> None:
        self._close()

    async def _make_logprobs(self, streams: list[RequestStream]) -> list[RequestStream]:
        """Make the objects for log-probabilities of `streams`; return the streams that were not closed meanwhile.

        They stay ready if the call is cancelled.
        """
        room, is_done = _OBJECTS_PER_TURN, False
        try:
            for stream in streams:
                room = await stream.make_logprobs(_OBJECTS_PER_TURN, room)
            is_done = True
        finally:
            streams = [stream for stream in streams if stream.group is self._ready]
            if not is_done:
                for stream in streams:
                    self._ready.append(stream)
        return streams

    def _attach_to_loop(self) -> None:
        """Receive on the running loop, which may not be that in which the requests were added."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._attach()
            self._loop = loop

    def _is_over(self) -> bool:
        """Return whether no request is left."""
        return not (self._streams or self._num_being_added)

    def _take_from(self, streams: list[RequestStream]) -> Outputs:
        """Return the outputs of `streams`, which were ready; forget the streams that have ended."""
        return output_path.current.take_outputs(streams, self._take_any)

    def _take_any(self, stream: RequestStream) -> RequestOutput | RequestFailure | None:
        """Return the output of a stream of any kind, or None without news; forget the stream if it has ended."""
        stream.is_ready = False
        if not stream.has_news():
            return None
        output: RequestOutput | RequestFailure
        try:
            output = cast("RequestOutput", stream.take())
        except Exception as error:
            output = RequestFailure(stream.request_id, error)
        if output.finished:
            self._streams.pop(stream.request_id, None)
        elif stream.has_logprobs and stream.has_news():
            stream.wake()  # tokens arrived while objects were made for this output
        return output

    def _close(self) -> None:
        streams, self._streams = self._streams, {}
        self._ready.take()
        for stream in streams.values():
            stream.group, stream.is_ready = None, False
            self._abandon(stream)
        self._ready.wake()


class _Relay:
    """Waits for the outputs of a group in place of a future, and passes them on when it is completed."""

    def __init__(self, group: StreamGroup, pass_on: Callable[[Outputs], Outputs]) -> None:
        self.left: asyncio.Future[Outputs] = asyncio.get_running_loop().create_future()
        """The outputs that `pass_on` left, or none after the last."""
        self._group = group
        self._pass_on = pass_on

    def done(self) -> bool:
        return self.left.done()

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self.left.get_loop()

    def set_result(self, result: None, /) -> None:
        """Pass on what is ready; unless something is left, wait for more."""
        group = self._group
        try:
            outputs = group._take_from(group._ready.take())
            left = self._pass_on(outputs) if outputs else []
        except Exception as error:
            self.left.set_exception(error)
            return
        if left or group._is_over():
            self.left.set_result(left)
        else:
            group._ready.set_waiter(self)
