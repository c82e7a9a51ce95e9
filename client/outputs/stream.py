"""A request as its consumer sees it: what all streams have in common, and the stream of completions."""

import asyncio
import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from vllm_mp import wire
from vllm_mp.client.outputs.completion import Completion
from vllm_mp.client.outputs.logprob_columns import LogprobColumns, TokenText
from vllm_mp.client.outputs.pooled_vector import PooledVector
from vllm_mp.client.outputs.wake_ups import Waiter, WakeUps, set_done
from vllm_mp.client.prompts.request import GenerationRequest, PoolingRequest, digest_of
from vllm_mp.outputs import PoolingRequestOutput, RequestMetrics, RequestOutput
from vllm_mp.requests.images import ProcessedImage
from vllm_mp.requests.pooling_params import PoolingParams
from vllm_mp.requests.sampling_params import RequestOutputKind, SamplingParams

AddMessage = wire.AddRequest | wire.AddPooling


Awaited = Completion | PooledVector
"""The result that arrives for a slot on the wire."""


class Isolation(NamedTuple):
    """How the core must isolate a completion or vector; the default: not at all."""

    until_num_tokens: int = 0
    """Number of output tokens from which on it runs with all requests."""
    group: int = 0
    """Names the requests of this client with which it runs until then."""


class RequestStream(ABC):
    """A live request and its consumer: what generation and pooling have in common.

    Only `OutputProcessor` ends a stream or anything that the stream awaits.
    """

    __slots__ = (
        "__weakref__",
        "_metrics",
        "_request",
        "_waiter",
        "after_pause",
        "error",
        "group",
        "has_logprobs",
        "is_ready",
        "is_replay",
        "num_cached_tokens",
        "num_prompt_tokens",
        "number",
        "params",
        "prompt",
        "prompt_token_ids",
        "request_id",
        "wake_ups",
    )

    def __init__(self, request: GenerationRequest | PoolingRequest) -> None:
        self.request_id = request.request_id
        self.params: SamplingParams | PoolingParams = request.params
        self.prompt = request.prompt
        self.prompt_token_ids = request.prompt_token_ids
        """The list that outputs show, which a consumer may change."""
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.after_pause = False
        """The client knew of a pause, which has not ended, when it sent the request."""
        self.is_replay = False
        """A core before the current one has admitted the request."""
        self.number = 0
        """Number of the request among the requests and calls that this client sent."""
        self.num_cached_tokens = 0
        """Prompt tokens whose keys and values were already in the core's cache when the first completion began."""
        self.has_logprobs = False
        """Outputs have log-probabilities, for which `make_logprobs` makes the objects."""
        self.error: Exception | None = None
        """The error that ended the stream; None without an error."""
        self.group: ReadyStreams | None = None
        """Where the stream is announced when there is an output, if a group consumes it; None if a consumer waits for
        this stream alone."""
        self.is_ready = False
        """The stream is in `group`."""
        self.wake_ups = WakeUps()
        """Wakes the consumers of all streams of an `OutputProcessor`, in slices."""
        self._request = request
        self._metrics = RequestMetrics(request.arrival_time)
        self._waiter: asyncio.Future[None] | None = None

    @property
    @abstractmethod
    def awaited(self) -> Sequence[Awaited]:
        """The completions, or the vector, that the core must deliver, each under its own slot."""

    @abstractmethod
    def add_message(self, index: int, incarnation: int, isolation: Isolation) -> AddMessage:
        """Return the message that asks a core for the rest of `awaited[index]`, which must have its slot."""

    def prefix(self) -> tuple[bytes, Hashable]:
        """Return the prompt as the wire carries it, and what prompts must have in common to share cached prefixes.

        The prompt is empty if it is given as embeddings.
        """
        request = self._request
        images = tuple(self.images)
        return request.packed_prompt, (request.cache_salt, request.lora and request.lora.lora_int_id, images)

    @property
    def images(self) -> Mapping[bytes, ProcessedImage]:
        """The images of the prompt by digest, which a core must have before it gets the request."""
        return self._request.images if isinstance(self._request, GenerationRequest) else {}

    @property
    def tenant(self) -> int:
        """Number of the party of this client for which the request runs."""
        return self._request.tenant

    @property
    def priority(self) -> int:
        """The priority of the request; smaller numbers come first."""
        return self._request.priority

    def digest(self) -> bytes:
        """Return the digest of the request, which equal requests share."""
        return digest_of(self._request)

    @property
    def is_over(self) -> bool:
        """Whether the stream has failed, or all that it awaits has ended."""
        if self.error is not None:
            return True
        for awaited in self.awaited:  # noqa: SIM110, because a generator is slower and this runs for every message
            if awaited.finish is None:
                return False
        return True

    def end(self, awaited: Awaited, finish: wire.Finished) -> None:
        """Record the end of `awaited` and wake the consumer; no-op after an earlier end or error."""
        if awaited.finish is None and self.error is None:
            awaited.finish = finish
            awaited.is_live = False
            self.note_end()

    def end_all(self, reason: str) -> None:
        """End, for `reason`, each completion or vector that has not ended."""
        for awaited in self.awaited:
            self.end(awaited, wire.Finished(awaited.slot, awaited.num_tokens, reason))

    def fail(self, error: Exception) -> None:
        """End the stream with an error and wake the consumer; no-op if the stream is over."""
        if not self.is_over:
            self.error = error
            for awaited in self.awaited:
                awaited.is_live = False
            self.wake()

    def note_end(self) -> None:
        """Wake the consumer, after an end, if there is an output for it; record the time if the stream is over."""
        if self.is_over:
            self._metrics.finished_time = time.time()
        if self.has_news():
            self.wake()

    async def next(self) -> RequestOutput | PoolingRequestOutput:
        """Return the next output as soon as there is news.

        Raises what `take` and `arrival` raise.
        """
        while not self.has_news():
            await self.arrival()
        return self.take()

    def arrival(self) -> "asyncio.Future[None]":
        """Return a future that is done when there may be news.

        Raises RuntimeError if another consumer waits already.
        """
        waiter = self._waiter
        if waiter is not None and not waiter.done() and not waiter.get_loop().is_closed():
            raise RuntimeError(f"request {self.request_id} has a consumer that waits; use one consumer for each stream")
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def wake(self) -> None:
        """Announce an output to the consumer, if it waits."""
        if self.group is not None:
            if not self.is_ready:
                self.is_ready = True
                self.group.append(self)
            return
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            self.wake_ups.add(waiter)

    @abstractmethod
    def has_news(self) -> bool:
        """Return whether there is an output for the consumer."""

    async def make_logprobs(self, per_turn: int, room: int) -> int:
        """Make the objects for the log-probabilities that have arrived; the next output covers these positions.

        The caller may make `room` objects, and after it `per_turn` in each turn of the event loop. Return the room that
        is left.
        """
        return room

    def take(self) -> RequestOutput | PoolingRequestOutput:
        """Return the output for the consumer, and mark its content as seen; call this if there is news.

        Raises a copy of the error that `fail` was given, and EngineGenerateError if a pooling request ended without its
        vector.
        """
        if self.error is not None:
            # A copy each time: the traceback of a shared exception would grow with every stream.
            raise type(self.error)(*self.error.args)
        return self._output()

    @abstractmethod
    def _output(self) -> RequestOutput | PoolingRequestOutput:
        """Return the output for the consumer, and mark its content as seen."""


class ReadyStreams:
    """The streams of a group that have an output, in the order in which it arrived."""

    __slots__ = ("_streams", "_waiter")

    def __init__(self) -> None:
        self._streams: list[RequestStream] = []
        self._waiter: Waiter | None = None

    def __len__(self) -> int:
        return len(self._streams)

    def append(self, stream: RequestStream) -> None:
        """Add a stream that is not among them, and wake the consumer."""
        self._streams.append(stream)
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            stream.wake_ups.add(waiter)

    def take(self) -> list[RequestStream]:
        """Return the streams, and forget them; the caller resets `is_ready` of each."""
        streams, self._streams = self._streams, []
        return streams

    def arrival(self) -> "asyncio.Future[None]":
        """Return a future that is done after the next `append` or `wake`."""
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        return waiter

    def set_waiter(self, waiter: Waiter | None) -> None:
        """Let the next `append` or `wake` complete `waiter`; None: nothing."""
        self._waiter = waiter

    def wake(self) -> None:
        """Wake the consumer, if it waits, without an output."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            set_done(waiter)


class GenerationStream(RequestStream):
    """Collects the completions of one prompt and hands out outputs when the consumer asks.

    Tokens accumulate until the consumer asks again: a slow consumer gets fewer and larger outputs, delays no other
    stream and loses nothing. Text is made when it is taken, unless it must be searched for stop strings.
    """

    __slots__ = (
        "_first",
        "_interval",
        "_is_delta",
        "_lora_request",
        "_prompt_logprobs",
        "_wakes_for_each_token",
        "completions",
        "is_plain",
    )

    def __init__(
        self,
        request: GenerationRequest,
        completions: Sequence[Completion],
        interval: int = 1,
        token_text: TokenText | None = None,
    ) -> None:
        """`completions` differ in index and seed alone; `interval` is the number of tokens between two outputs."""
        super().__init__(request)
        self.params: SamplingParams
        self._request: GenerationRequest
        self.completions = completions
        self._interval = interval
        self._lora_request = copy.copy(request.lora)
        """The adapter that outputs show, which a consumer may change."""
        self._prompt_logprobs = None if self.params.prompt_logprobs is None else LogprobColumns(token_text, first=1)
        """None unless the request asks for them, and with DELTA after the first output."""
        self._is_delta = self.params.output_kind == RequestOutputKind.DELTA
        self._wakes_for_each_token = (
            self.params.output_kind != RequestOutputKind.FINAL_ONLY and interval == 1 and self._prompt_logprobs is None
        )
        """Each token is news."""
        self.has_logprobs = self._prompt_logprobs is not None or completions[0].logprobs is not None
        self._first = completions[0]
        self.is_plain = (
            len(completions) == 1 and self._wakes_for_each_token and completions[0].is_plain and request.lora is None
        )
        """Before the end, each token is news, and an output has only tokens of a single completion, and their text."""

    @property
    def awaited(self) -> Sequence[Completion]:
        return self.completions

    def add_message(self, index: int, incarnation: int, isolation: Isolation) -> wire.AddRequest:
        request, completion = self._request, self.completions[index]
        return wire.AddRequest(
            incarnation=incarnation,
            slot=completion.slot,
            request_id=request.request_id,
            prompt=request.packed_prompt,
            params=completion.params,
            priority=request.priority,
            output=wire.pack_ids(completion.token_ids),
            cache_salt=request.cache_salt,
            group=request.group,
            bad_words=list(request.bad_words),
            isolate_until_num_tokens=isolation.until_num_tokens,
            isolation_group=isolation.group,
            after_pause=self.after_pause,
            arrival_time=request.arrival_time,
            prompt_embeds=request.prompt_embeds,
            extra_args=request.extra_args,
            constraint=request.constraint,
            lora=request.lora,
            adapter_digest=completion.adapter_digest if completion.token_ids else "",
            tenant=request.tenant,
            is_replay=self.is_replay,
            images=list(request.placed_images),
        )

    def take_in_prompt_logprobs(self, message: wire.TokenLogprobs) -> None:
        """Add log-probabilities of prompt tokens; repeated positions are ignored.

        Raises ValueError for a message that leaves a gap or whose parts disagree.
        """
        if self._prompt_logprobs is not None:
            self._prompt_logprobs.append(message)

    def wake_for_tokens(self, now: float) -> None:
        """Wake the consumer if it wants to see the new tokens; `now` is in seconds of `time.time()`."""
        self._metrics.last_token_time = now
        if self._metrics.first_token_time is None:
            self._metrics.first_token_time = now
        if self._wakes_for_each_token or self.has_news():
            self.wake()

    def has_news(self) -> bool:
        if self.params.output_kind == RequestOutputKind.FINAL_ONLY:
            return self.is_over
        known = self._prompt_logprobs
        if known is not None and len(known) < self.num_prompt_tokens and not self.is_over:
            # Only the first completion brings these, and another may be ahead of it; the first output has all of them.
            return False
        if self.error is not None:
            return True
        for completion in self.completions:  # noqa: SIM110, as in `is_over`
            if completion.has_news(self._interval):
                return True
        return False

    async def make_logprobs(self, per_turn: int, room: int) -> int:
        for columns in (self._prompt_logprobs, *[completion.logprobs for completion in self.completions]):
            if columns is None:
                continue
            until = len(columns)
            while columns.num_made < min(until, len(columns)):
                if room <= 0:
                    await self.wake_ups.turn()
                    room = per_turn
                room -= columns.make(until, room)
        return room

    def _output(self) -> RequestOutput:
        completions, prompt_logprobs = self.completions, self._prompt_logprobs
        if prompt_logprobs is not None:
            prompt_logprobs.make(len(prompt_logprobs))
        if len(completions) == 1:
            outputs = [completions[0].output()]
            finished = completions[0].is_taken
        else:
            shown = completions
            if self._is_delta:
                shown = [completion for completion in completions if completion.has_news(1)]
            outputs = [completion.output() for completion in shown]
            finished = all(completion.is_taken for completion in completions)
        if self._is_delta:
            self._prompt_logprobs = None
        lora_request = self._lora_request
        if lora_request is not None:
            for output in outputs:
                output.lora_request = lora_request
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            None if prompt_logprobs is None else prompt_logprobs.made,
            outputs,
            finished,
            self._metrics,
            lora_request,
            num_cached_tokens=self.num_cached_tokens,
        )
