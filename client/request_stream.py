"""One request as its consumer sees it."""

import asyncio
import time

from vllm_mp.client.detokenizer import IncrementalDetokenizer
from vllm_mp.outputs import CompletionOutput, RequestMetrics, RequestOutput
from vllm_mp.sampling_params import RequestOutputKind, SamplingParams
from vllm_mp.wire import Finished


class RequestStream:
    """Takes tokens in as they arrive and hands outputs out as the consumer asks.

    Between two requests of the consumer tokens merely pile up, so a slow consumer gets fewer, larger outputs, holds up
    nobody and loses nothing. Text is made when it is taken.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        detokenizer: IncrementalDetokenizer | None,
        arrival_time: float,
    ) -> None:
        self.request_id = request_id
        self.slot = -1
        """What names the request on the wire, once it has been sent."""
        self.params = params
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.token_ids: list[int] = []
        """Every token received; recovery sends these to the next core."""
        self.num_cached_tokens = 0
        """Prompt tokens whose keys and values were in the core's cache already."""
        self.finish: Finished | None = None
        self._metrics = RequestMetrics(arrival_time)
        self._detokenizer = detokenizer
        self._text = ""
        self._num_taken = 0
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_over(self) -> bool:
        """Nothing more will arrive."""
        return self.finish is not None or self._error is not None

    def take_in(self, token_id: int, position: int) -> bool:
        """Add a token whose position has the lower 16 bits `position`; False if tokens are missing before it.

        A token that came before is ignored.
        """
        ahead = (position - len(self.token_ids)) & 0xFFFF
        if ahead == 0:
            self.token_ids.append(token_id)
            return True
        return ahead >= 0x8000

    def end(self, finish: Finished) -> None:
        """Note the end, unless there was one already, and wake the consumer."""
        if not self.is_over:
            self.finish = finish
            self._metrics.finished_time = time.time()
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
        if self.params.output_kind != RequestOutputKind.FINAL_ONLY:
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
        if self.is_over:
            return True
        wants_tokens = self.params.output_kind != RequestOutputKind.FINAL_ONLY
        return wants_tokens and len(self.token_ids) > self._num_taken

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done() and not waiter.get_loop().is_closed():
            waiter.set_result(None)

    def _output(self) -> RequestOutput:
        new_ids = self.token_ids[self._num_taken :]
        self._num_taken += len(new_ids)
        new_text = self._detokenize(new_ids)
        delta = self.params.output_kind == RequestOutputKind.DELTA
        self._text += new_text
        finish = self.finish
        completion = CompletionOutput(
            index=0,
            text=new_text if delta else self._text,
            token_ids=new_ids if delta else list(self.token_ids),
            finish_reason=finish.reason if finish else None,
            stop_reason=finish.stop_reason if finish else None,
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[completion],
            finished=finish is not None,
            metrics=self._metrics,
            num_cached_tokens=self.num_cached_tokens,
        )

    def _detokenize(self, new_ids: list[int]) -> str:
        if self._detokenizer is None:
            return ""
        finish = self.finish
        if finish and finish.reason == "stop" and not self.params.include_stop_str_in_output:
            new_ids = new_ids[:-1]  # the token that stopped it came with the end, so it is among these
        text = self._detokenizer.append(new_ids)
        return text + self._detokenizer.flush() if finish else text
