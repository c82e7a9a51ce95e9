"""What a consumer of the engine receives."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(slots=True)
class Logprob:
    """The natural logarithm of a token's probability, its place among all tokens (1: the most likely), its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsOnePosition = dict[int, Logprob]
"""By token id: the chosen token first, then the most likely ones."""


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds of `time.time()`; None where the moment has not come."""

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One answer to a prompt.

    `finish_reason` is None while it runs, then "stop", "length", "abort" or "error"; `stop_reason` is the stop
    string or stop token id that ended it, None for end-of-sequence. `token_ids` holds the token that stopped
    it, `text` does not unless `include_stop_str_in_output` asks for it. `logprobs` has an entry for each of
    `token_ids`, and `cumulative_logprob` is the sum over the whole answer, where the request asked for them.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[LogprobsOnePosition] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The state of a request, or with `RequestOutputKind.DELTA` what is new in it.

    `prompt_logprobs`, where asked for, has an entry for each prompt token, None for the first; with DELTA it is in
    the first output only.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[LogprobsOnePosition | None] | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
    lora_request: Any = None


@dataclass(slots=True)
class PoolingOutput:
    """`data` is the vector, float32 [dimensions]."""

    data: npt.NDArray[np.float32]

    @property
    def embedding(self) -> list[float]:
        """The vector as a list."""
        vector: list[float] = self.data.tolist()
        return vector


@dataclass(slots=True)
class PoolingRequestOutput:
    """The answer to `encode`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: PoolingOutput
    finished: bool = True
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None


EmbeddingRequestOutput = PoolingRequestOutput
"""The same class under its older name."""
