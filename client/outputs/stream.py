"""One request as its consumer sees it."""

import asyncio
import time
from collections.abc import Sequence

from vllm_mp.client.outputs.completion import Completion, TokenText, append_logprobs
from vllm_mp.outputs import LogprobsOnePosition, RequestMetrics, RequestOutput
from vllm_mp.sampling_params import RequestOutputKind
from vllm_mp.wire import Finished, TokenLogprobs


class RequestStream:
    """Collects the answers to one prompt and hands outputs out as the consumer asks.

    Between two requests of the consumer tokens merely pile up, so a slow consumer gets fewer, larger outputs, holds up
    nobody and loses nothing. Text is made when it is taken, unless it has to be searched for stop strings.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        answers: Sequence[Completion],
        arrival_time: float,
        interval: int = 1,
        token_text: TokenText | None = None,
    ) -> None:
        """`answers` differ in index and seed alone; `interval` is the number of tokens between two outputs."""
        self.request_id = request_id
        self.params = answers[0].params
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.answers = answers
        self.is_held = False
        """It has arrived during a pause, whose end it waits for."""
        self.num_cached_tokens = 0
        """Prompt tokens whose keys and values were in the core's cache already when the first answer began."""
        self._interval = interval
        self._metrics = RequestMetrics(arrival_time)
        self._token_text = token_text
        self._prompt_logprobs: list[LogprobsOnePosition | None] | None = None
        if self.params.prompt_logprobs is not None:
            self._prompt_logprobs = [None]
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_over(self) -> bool:
        """Nothing more will arrive."""
        if self._error is not None:
            return True
        for answer in self.answers:  # noqa: SIM110, as a generator takes longer, at every token of every stream
            if answer.finish is None:
                return False
        return True

    def take_in_prompt_logprobs(self, message: TokenLogprobs) -> None:
        """Add the log-probabilities of prompt tokens; those that came before are ignored."""
        if self._prompt_logprobs is not None:
            append_logprobs(self._prompt_logprobs, message, self._token_text)

    def end(self, answer: Completion, finish: Finished) -> None:
        """Note the end of an answer, unless there was one already, and wake the consumer."""
        if answer.finish is None and self._error is None:
            answer.finish = finish
            self.note_end()

    def end_all(self, reason: str) -> None:
        """End the answers that have no end yet, for `reason`."""
        for answer in self.answers:
            self.end(answer, Finished(answer.slot, len(answer.token_ids), reason))

    def note_end(self) -> None:
        """Wake the consumer, after an answer has got its end."""
        if self.is_over:
            self._metrics.finished_time = time.time()
        if self.is_over or self.params.output_kind != RequestOutputKind.FINAL_ONLY:
            self._wake()

    def fail(self, error: Exception) -> None:
        """End with an error, unless there was an end already, and wake the consumer."""
        if not self.is_over:
            self._error = error
            self._wake()

    def wake_for_tokens(self, now: float) -> None:
        """Wake the consumer, if it wants to see what has arrived; `now` is in seconds of `time.time()`."""
        self._metrics.last_token_time = now
        if self._metrics.first_token_time is None:
            self._metrics.first_token_time = now
        if self._has_news():
            self._wake()

    async def next(self) -> RequestOutput:
        """The next output, when there is news; raises what `fail` was given. One consumer at a time."""
        while not self._has_news():
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None:
            # A new one each time, or the traceback of a shared one would grow with every stream.
            raise type(self._error)(*self._error.args)
        return self._output()

    def _has_news(self) -> bool:
        if self.params.output_kind == RequestOutputKind.FINAL_ONLY:
            return self.is_over
        known = self._prompt_logprobs
        if known is not None and len(known) < len(self.prompt_token_ids) and not self.is_over:
            # Another answer may be ahead of the first, which brings these; the first output has all of them.
            return False
        if self._error is not None:
            return True
        for answer in self.answers:  # noqa: SIM110, as in `is_over`
            if answer.has_news(self._interval):
                return True
        return False

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done() and not waiter.get_loop().is_closed():
            waiter.set_result(None)

    def _output(self) -> RequestOutput:
        delta = self.params.output_kind == RequestOutputKind.DELTA
        shown = [answer for answer in self.answers if answer.has_news(1)] if delta else self.answers
        completions = [answer.completion() for answer in shown]
        prompt_logprobs = self._prompt_logprobs
        if delta:
            self._prompt_logprobs = None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=completions,
            finished=all(answer.is_taken for answer in self.answers),
            prompt_logprobs=prompt_logprobs,
            metrics=self._metrics,
            num_cached_tokens=self.num_cached_tokens,
        )
