"""A request as its consumer sees it: a stream of completions, or of one vector."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_mp import wire
from vllm_mp.client.outputs.completion import Completion, TokenText, append_logprobs
from vllm_mp.client.request import GenerationRequest, PoolingRequest
from vllm_mp.errors import EngineGenerateError
from vllm_mp.outputs import LogprobsOnePosition, PoolingOutput, PoolingRequestOutput, RequestMetrics, RequestOutput
from vllm_mp.pooling_params import PoolingParams
from vllm_mp.sampling_params import RequestOutputKind, SamplingParams

AddMessage = wire.AddRequest | wire.AddPooling


class PooledVector:
    """The vector of a pooling request, which takes one slot on the wire as a completion does."""

    index = 0
    num_tokens = 0
    """Number of output tokens: a vector has none."""

    def __init__(self) -> None:
        self.slot = -1
        """The slot of the vector; -1 until its request enters `OutputProcessor`."""
        self.finish: wire.Finished | None = None
        """The end of the request; None while it runs."""
        self.data: npt.NDArray[np.float32] | None = None
        """float32 [dimensions]; None until it has arrived."""

    def take_in(self, data: bytes) -> None:
        """Keep the vector `data`, little-endian float32. Raises ValueError if its length is no multiple of 4."""
        self.data = np.frombuffer(data, "<f4").astype(np.float32)


Awaited = Completion | PooledVector
"""The result that a slot on the wire brings."""


class RequestStream(ABC):
    """A live request and its consumer: what generation and pooling have in common.

    Only `OutputProcessor` ends a stream or anything that the stream awaits.
    """

    def __init__(self, request: GenerationRequest | PoolingRequest) -> None:
        self.request_id = request.request_id
        self.params: SamplingParams | PoolingParams = request.params
        self.prompt = request.prompt
        self.prompt_token_ids = request.prompt_token_ids
        self.is_held = False
        """The request arrived during a pause and waits for the pause to end."""
        self.num_cached_tokens = 0
        """Prompt tokens whose keys and values were already in the core's cache when the first completion began."""
        self.error: Exception | None = None
        """The error that ended the stream; None without an error."""
        self._metrics = RequestMetrics(request.arrival_time)
        self._waiter: asyncio.Future[None] | None = None

    @property
    @abstractmethod
    def awaited(self) -> Sequence[Awaited]:
        """The completions, or the vector, that the core must bring, each under its own slot."""

    @abstractmethod
    def add_message(self, index: int, incarnation: int, isolate_until_num_tokens: int) -> AddMessage:
        """Return the message that asks a core for the rest of `awaited[index]`, which must have its slot."""

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
            self.note_end()

    def end_all(self, reason: str) -> None:
        """End, for `reason`, each completion or vector that has not ended."""
        for awaited in self.awaited:
            self.end(awaited, wire.Finished(awaited.slot, awaited.num_tokens, reason))

    def fail(self, error: Exception) -> None:
        """End the stream with an error and wake the consumer; no-op if the stream is over."""
        if not self.is_over:
            self.error = error
            self._wake()

    def note_end(self) -> None:
        """Wake the consumer, after an end, if there is an output for it; record the time if the stream is over."""
        if self.is_over:
            self._metrics.finished_time = time.time()
        if self._has_news():
            self._wake()

    async def next(self) -> RequestOutput | PoolingRequestOutput:
        """Return the next output as soon as there is news.

        Raises a copy of the error that `fail` was given, and EngineGenerateError if a pooling request ended without its
        vector. At most one consumer may wait at a time.
        """
        while not self._has_news():
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self.error is not None:
            # A copy each time: the traceback of a shared exception would grow with every stream.
            raise type(self.error)(*self.error.args)
        return self._output()

    @abstractmethod
    def _has_news(self) -> bool:
        """Return whether there is an output for the consumer."""

    @abstractmethod
    def _output(self) -> RequestOutput | PoolingRequestOutput:
        """Return the output for the consumer, and mark its content as seen."""

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done() and not waiter.get_loop().is_closed():
            waiter.set_result(None)


class GenerationStream(RequestStream):
    """Collects the completions of one prompt and hands out outputs when the consumer asks.

    Tokens accumulate until the consumer asks again: a slow consumer gets fewer and larger outputs, delays no other
    stream and loses nothing. Text is made when it is taken, unless it must be searched for stop strings.
    """

    def __init__(
        self,
        request: GenerationRequest,
        completions: Sequence[Completion],
        interval: int = 1,
        token_text: TokenText | None = None,
    ) -> None:
        """`completions` differ in index and seed alone; `interval` is the number of tokens between two outputs."""
        super().__init__(request)
        self.params: SamplingParams = request.params
        self.completions = completions
        self._request = request
        self._interval = interval
        self._token_text = token_text
        self._prompt_logprobs: list[LogprobsOnePosition | None] | None = None
        if self.params.prompt_logprobs is not None:
            self._prompt_logprobs = [None]

    @property
    def awaited(self) -> Sequence[Completion]:
        return self.completions

    def add_message(self, index: int, incarnation: int, isolate_until_num_tokens: int) -> wire.AddRequest:
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
            isolate_until_num_tokens=isolate_until_num_tokens,
        )

    def take_in_prompt_logprobs(self, message: wire.TokenLogprobs) -> None:
        """Add log-probabilities of prompt tokens; repeated positions are ignored.

        Raises ValueError for a message that leaves a gap or whose parts disagree.
        """
        if self._prompt_logprobs is not None:
            append_logprobs(self._prompt_logprobs, message, self._token_text)

    def wake_for_tokens(self, now: float) -> None:
        """Wake the consumer if it wants to see the new tokens; `now` is in seconds of `time.time()`."""
        self._metrics.last_token_time = now
        if self._metrics.first_token_time is None:
            self._metrics.first_token_time = now
        if self._has_news():
            self._wake()

    def _has_news(self) -> bool:
        if self.params.output_kind == RequestOutputKind.FINAL_ONLY:
            return self.is_over
        known = self._prompt_logprobs
        if known is not None and len(known) < len(self.prompt_token_ids) and not self.is_over:
            # Only the first completion brings these, and another may be ahead of it; the first output has all of them.
            return False
        if self.error is not None:
            return True
        for completion in self.completions:  # noqa: SIM110, as in `is_over`
            if completion.has_news(self._interval):
                return True
        return False

    def _output(self) -> RequestOutput:
        delta = self.params.output_kind == RequestOutputKind.DELTA
        completions = self.completions
        shown = [completion for completion in completions if completion.has_news(1)] if delta else completions
        outputs = [completion.output() for completion in shown]
        prompt_logprobs = self._prompt_logprobs
        if delta:
            self._prompt_logprobs = None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            finished=all(completion.is_taken for completion in completions),
            prompt_logprobs=prompt_logprobs,
            metrics=self._metrics,
            num_cached_tokens=self.num_cached_tokens,
        )


class PoolingStream(RequestStream):
    """Waits for the vector of one prompt, which is its only output."""

    def __init__(self, request: PoolingRequest) -> None:
        super().__init__(request)
        self.vector = PooledVector()
        self._request = request

    @property
    def awaited(self) -> Sequence[PooledVector]:
        return (self.vector,)

    def add_message(self, index: int, incarnation: int, isolate_until_num_tokens: int) -> wire.AddPooling:
        request = self._request
        return wire.AddPooling(
            incarnation=incarnation,
            slot=self.vector.slot,
            request_id=request.request_id,
            prompt=request.packed_prompt,
            params=request.params,
            priority=request.priority,
            cache_salt=request.cache_salt,
            isolate_until_num_tokens=isolate_until_num_tokens,
        )

    def _has_news(self) -> bool:
        return self.is_over

    def _output(self) -> PoolingRequestOutput:
        """Return the vector. Raises EngineGenerateError if there is none, as for a request that was aborted."""
        vector, finish = self.vector.data, self.vector.finish
        if vector is None:
            why = "was aborted" if finish and finish.reason == "abort" else "ended without its vector"
            raise EngineGenerateError(f"request {self.request_id} {why}")
        return PoolingRequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=PoolingOutput(vector),
            metrics=self._metrics,
            num_cached_tokens=self.num_cached_tokens,
        )
