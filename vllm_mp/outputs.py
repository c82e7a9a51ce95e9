"""The outputs that a consumer of a stream receives.

Most are msgspec structs, because one is made for each token. They hold no reference cycles, so the garbage collector
does not track them.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt


class Logprob(msgspec.Struct, gc=False):
    """A token's probability as natural logarithm, its rank among all tokens (1: the most likely), and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsOnePosition = dict[int, Logprob]
"""Log-probabilities by token id: the chosen token first, then the most likely tokens."""


class RequestMetrics(msgspec.Struct, gc=False):
    """Times of a request, in seconds of `time.time()`; None for a moment that has not come yet."""

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None


class CompletionOutput(msgspec.Struct, gc=False):
    """A completion: one of the `n` results of a prompt."""

    index: int
    """Number of the completion, 0 to `n - 1`."""
    text: str
    """Without the stop string, unless `include_stop_str_in_output` is set."""
    token_ids: list[int]
    """Including the token that ended the completion."""
    cumulative_logprob: float | None = None
    """Sum of the chosen tokens' log-probabilities over the whole completion, if the request asks for `logprobs`."""
    logprobs: list[LogprobsOnePosition] | None = None
    """An entry for each token of `token_ids`, if the request asks for `logprobs`."""
    finish_reason: str | None = None
    """None while the completion runs, then "stop", "length", "abort" or "error"."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended the completion; None for end-of-sequence."""
    lora_request: Any = None
    """Always None: this version serves no LoRA adapters."""

    def finished(self) -> bool:
        """Return whether the completion has ended."""
        return self.finish_reason is not None


_LAZY = ("text", "token_ids", "logprobs")


class CumulativeOutput(CompletionOutput, gc=False):
    """A completion so far, whose text, token ids and log-probabilities are made when they are first read.

    So a stream whose consumer reads only some of its outputs, or only some of their fields, does not copy the whole
    completion for each token.
    """

    _pieces: list[str] = []
    """The pieces of the text, of which the first `_num_pieces` belong to this output. The stream appends to this list,
    and to the two that follow; what they hold is never changed."""
    _num_pieces: int = 0
    _all_token_ids: list[int] = []
    _num_tokens: int = 0
    _all_logprobs: list[LogprobsOnePosition] | None = None

    def __post_init__(self) -> None:
        # A field without a value is looked up by `__getattr__`.
        for name in _LAZY:
            delattr(self, name)

    def __getattr__(self, name: str) -> Any:
        """Make the value of a field that is read for the first time."""
        value: Any
        if name == "text":
            value = "".join(self._pieces[: self._num_pieces])
        elif name == "token_ids":
            value = self._all_token_ids[: self._num_tokens]
        elif name == "logprobs":
            value = None if self._all_logprobs is None else self._all_logprobs[: self._num_tokens]
        else:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        setattr(self, name, value)
        return value

    def __eq__(self, other: object) -> bool:
        return self._plain() == (other._plain() if isinstance(other, CumulativeOutput) else other)

    def __repr__(self) -> str:
        return repr(self._plain())

    def __copy__(self) -> CompletionOutput:
        return self._plain()

    def __reduce__(self) -> Any:
        return self._plain().__reduce__()

    def _plain(self) -> CompletionOutput:
        """Return the same output with all its values."""
        return CompletionOutput(*[getattr(self, name) for name in CompletionOutput.__struct_fields__])


class RequestOutput(msgspec.Struct, gc=False):
    """The state of a request; with `RequestOutputKind.DELTA` only what is new since the last output."""

    request_id: str
    prompt: str | None
    """The prompt's text, if the caller gave text."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    """True in the last output: all completions have ended."""
    prompt_logprobs: list[LogprobsOnePosition | None] | None = None
    """An entry for each prompt token, None for the first token, if the request asks for it; with DELTA in the first
    output only."""
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
    """Number of prompt tokens that the prefix cache held."""
    lora_request: Any = None
    """Always None: this version serves no LoRA adapters."""


class RequestFailure(msgspec.Struct, gc=False):
    """The end of a request that failed, in place of an output, from `StreamGroup`."""

    request_id: str
    error: Exception
    """What `AsyncLLM.generate` would raise."""
    finished: bool = True


@dataclass(slots=True)
class PoolingOutput:
    """The vector of a prompt."""

    data: npt.NDArray[np.float32]
    """float32 [dimensions]."""

    @property
    def embedding(self) -> list[float]:
        """Return the vector as a list."""
        vector: list[float] = self.data.tolist()
        return vector


@dataclass(slots=True)
class PoolingRequestOutput:
    """The output of `encode`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: PoolingOutput
    finished: bool = True
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
    """Number of prompt tokens that the prefix cache held."""


EmbeddingRequestOutput = PoolingRequestOutput
"""The same class under its older name."""
