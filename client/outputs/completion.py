"""A completion as it arrives: its tokens, their log-probabilities, and their text."""

from collections.abc import Sequence

from vllm_mp.client.outputs.cumulative import CumulativeOutput, GrowingText
from vllm_mp.client.outputs.detokenizer import IncrementalDetokenizer
from vllm_mp.client.outputs.logprob_columns import LogprobColumns, TokenText
from vllm_mp.client.outputs.stop_strings import StopStrings
from vllm_mp.outputs import CompletionOutput
from vllm_mp.requests.sampling_params import RequestOutputKind, SamplingParams
from vllm_mp.wire import Finished


class Completion:
    """Takes tokens in by position and turns them into text: when the consumer asks, or at once to find stop strings."""

    __slots__ = (
        "__weakref__",
        "_append_text",
        "_byte_text",
        "_detokenizer",
        "_end_is_taken",
        "_is_delta",
        "_num_read",
        "_num_taken",
        "_stops",
        "_text",
        "_text_is_complete",
        "adapter_digest",
        "finish",
        "index",
        "is_live",
        "is_plain",
        "logprobs",
        "params",
        "slot",
        "token_ids",
    )

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        detokenizer: IncrementalDetokenizer | None = None,
        token_text: TokenText | None = None,
    ) -> None:
        """`params` are this completion's own (n=1, its own seed).

        Without a `detokenizer` the text stays empty. `token_text` gives log-probabilities the text of their tokens.
        """
        self.index = index
        self.slot = -1
        """The slot of the completion; -1 until its request enters `OutputProcessor`."""
        self.params = params
        self.token_ids: list[int] = []
        """Every token received; after a death they are sent to the next core."""
        self.finish: Finished | None = None
        """The end of the completion; None while it runs."""
        self.adapter_digest = ""
        """Digest of the weights of the adapter that computes the tokens; empty for the base model."""
        self.is_live = True
        """Whether tokens may still arrive: neither the completion nor, with an error, its stream has ended."""
        self._detokenizer = detokenizer
        self._append_text = detokenizer.append if detokenizer is not None else _no_text
        self._byte_text = getattr(detokenizer, "byte_text", None)
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        self.logprobs = None if params.logprobs is None else LogprobColumns(token_text)
        """The log-probabilities of the tokens; None unless the request asks for them."""
        self._is_delta = params.output_kind == RequestOutputKind.DELTA
        self.is_plain = self._stops is None and self.logprobs is None
        """Before the end, an output has tokens and their text, and nothing else."""
        self._text = GrowingText()
        """All text so far; with DELTA the text that the consumer has not taken yet."""
        self._num_read = 0
        """Number of tokens that have been turned into text."""
        self._text_is_complete = False
        self._num_taken = 0
        """Number of tokens that the consumer has seen."""
        self._end_is_taken = False

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def wants_stop_strings(self) -> bool:
        """Whether the text must be read as it arrives, because it may end the completion."""
        return self._stops is not None

    @property
    def is_taken(self) -> bool:
        """Whether the consumer has seen the end."""
        return self._end_is_taken

    def take_in(self, token_id: int, position: int) -> bool:
        """Add a token; return False if tokens are missing before it.

        `position` is the lower 16 bits of the token's position. A token that was received before is ignored.
        """
        ahead = (position - len(self.token_ids)) & 0xFFFF
        if ahead == 0:
            self.token_ids.append(token_id)
            return True
        return ahead >= 0x8000

    def has_news(self, interval: int) -> bool:
        """Return whether the consumer has not seen an end, a first token or at least `interval` tokens."""
        if self.finish is not None:
            return not self._end_is_taken
        num_new = len(self.token_ids) - self._num_taken
        return num_new >= interval or (num_new > 0 and self._num_taken == 0)

    def read(self, end: int | None = None) -> None:
        """Turn the tokens before position `end` (None: all) into text; end the completion at a stop string.

        `end` must be None for a text that is searched for stop strings.
        """
        detokenizer, finish = self._detokenizer, self.finish
        if detokenizer is None or self._text_is_complete:
            return
        if end is None:
            end = len(self.token_ids)
        elif end < len(self.token_ids):
            finish = None
        new_ids = self.token_ids[self._num_read : end]
        start, self._num_read = self._num_read, end
        self._text_is_complete = finish is not None
        if new_ids and finish and finish.reason == "stop" and not self.params.include_stop_str_in_output:
            new_ids.pop()  # the stop token: it arrives together with the end, so it is the last of these
        if self._stops is None:
            self._text.append(detokenizer.append(new_ids))
            if finish:
                self._text.append(detokenizer.flush())
            return
        for count, token_id in enumerate(new_ids, start + 1):
            piece = detokenizer.append((token_id,))
            if count <= self.params.min_tokens:
                self._text.append(self._stops.skip(piece))
                continue
            self._text.append(self._stops.feed(piece))
            if self._stops.found is not None:
                self._cut(count, self._stops.found)
                return
        if finish:
            rest = detokenizer.flush()
            if start + len(new_ids) > self.params.min_tokens:
                rest = self._stops.feed(rest)
                if self._stops.found is not None:
                    self._cut(len(self.token_ids), self._stops.found)
            else:
                rest = self._stops.skip(rest)
            rest += self._stops.flush()
            self._text.append(rest)

    def output(self) -> CompletionOutput:
        """Return what the next output shows, or with DELTA only what the consumer has not seen; mark it as seen.

        That is all that has arrived, except tokens whose log-probabilities are not objects yet although earlier ones
        are, which belong to a later output. Text that is searched for stop strings does not wait for them.
        """
        finish = self.finish
        if self._is_delta and self.is_plain and finish is None:
            new_ids = self.token_ids[self._num_taken :]
            self._num_taken = self._num_read = len(self.token_ids)
            return CompletionOutput(self.index, self._append_text(new_ids), new_ids)
        # Before its end, only OutputProcessor reads a text that is searched, because the core must be told of a stop.
        if self._stops is not None and finish is not None:
            self.read()
        end = self._end_of_output()
        if self._stops is None:
            self.read(end)
        if end < len(self.token_ids):
            finish = None
        start, self._num_taken = self._num_taken, end
        self._end_is_taken = finish is not None
        reason, stop_reason = (finish.reason, finish.stop_reason) if finish is not None else (None, None)
        logprobs = self.logprobs
        if not self._is_delta:
            return CumulativeOutput(
                self.index,
                "",
                [],
                None if logprobs is None else logprobs.sum,
                None,
                None,
                reason,
                stop_reason,
                None,
                self._text,
                len(self._text),
                self.token_ids,
                end,
                None if logprobs is None else logprobs.made,
            )
        return CompletionOutput(
            index=self.index,
            text=self._text.take(),
            token_ids=self.token_ids[start:end],
            cumulative_logprob=None if logprobs is None else logprobs.sum,
            logprobs=None if logprobs is None else logprobs.take(),
            finish_reason=reason,
            stop_reason=stop_reason,
        )

    def _end_of_output(self) -> int:
        """Return the number of tokens that the next output covers, and make objects if none were made for it."""
        num_tokens, logprobs = len(self.token_ids), self.logprobs
        if logprobs is None:
            return num_tokens
        if logprobs.num_made <= self._num_taken:
            logprobs.make(num_tokens)
        return min(logprobs.num_made, num_tokens) if logprobs.num_made < len(logprobs) else num_tokens

    def _cut(self, count: int, stop: str) -> None:
        """End the completion for the stop string `stop`, which token number `count` completes."""
        del self.token_ids[count:]
        if self.logprobs is not None:
            self.logprobs.cut(count)
        self.finish = Finished(self.slot, count, "stop", stop)
        self.is_live = False
        self._text_is_complete = True


def _no_text(token_ids: Sequence[int]) -> str:
    """Return no text, in a completion without a detokenizer."""
    return ""
