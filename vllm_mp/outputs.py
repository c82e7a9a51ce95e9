"""The outputs that a consumer of a stream receives.

Most are msgspec structs, because one is made for each token. They hold no reference cycles, so the garbage collector
does not track them.
"""

from dataclasses import dataclass
from typing import NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_mp.requests.lora_request import LoRARequest


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
    lora_request: LoRARequest | None = None
    """The adapter of the request; None for the base model."""

    def finished(self) -> bool:
        """Return whether the completion has ended."""
        return self.finish_reason is not None


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
    lora_request: LoRARequest | None = None
    """The adapter of the request; None for the base model."""


class RequestFailure(msgspec.Struct, gc=False):
    """The end of a request that failed, instead of an output, from `StreamGroup` and `LLM`."""

    request_id: str
    error: Exception
    """What `AsyncLLM.generate` would raise."""
    finished: bool = True

    @property
    def outputs(self) -> NoReturn:
        """Raise `error`, so that code which expects an output fails with the cause."""
        raise self.error


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


@dataclass(slots=True)
class ScoringOutput:
    """The score of a pair of texts."""

    score: float


@dataclass(slots=True)
class ScoringRequestOutput:
    """The output of `LLM.score` for a pair of texts."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    """The token ids of both texts."""
    finished: bool = True
    num_cached_tokens: int | None = None


@dataclass(slots=True)
class ClassificationOutput:
    """The classes of a prompt."""

    probs: list[float]
    """A probability for each class."""

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ClassificationRequestOutput:
    """The output of `LLM.classify` for a prompt."""

    request_id: str
    outputs: ClassificationOutput
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int | None = None


EmbeddingRequestOutput = PoolingRequestOutput
EmbeddingOutput = PoolingOutput
"""The same classes under their older names."""
