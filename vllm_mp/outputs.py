"""The outputs that a consumer of a stream receives.

Most are msgspec structs, because one is made for each token. They hold no reference cycles, so the garbage collector
does not track them.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_mp.arguments.unserved_names import refuse_attributes
from vllm_mp.requests.lora_request import LoRARequest


class _DataclassFields:
    """The fields of a struct in the form of those of a dataclass, made when they are read."""

    def __get__(self, instance: Any, owner: type[msgspec.Struct]) -> dict[str, Any]:
        like: Any = dataclasses.make_dataclass(owner.__name__, _public_fields(owner))
        fields: dict[str, Any] = like.__dataclass_fields__
        return fields


def _public_fields(struct: type[msgspec.Struct]) -> list[str]:
    return [name for name in struct.__struct_fields__ if not name.startswith("_")]


class _Output(msgspec.Struct, gc=False):
    """A struct that `vars` and the functions of `dataclasses` read, as they read the classes of vLLM."""

    __dataclass_fields__ = _DataclassFields()

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]  # that of an object cannot be computed
        return {name: getattr(self, name) for name in _public_fields(type(self))}


class Logprob(_Output, gc=False):
    """A token's probability as natural logarithm, its rank among all tokens (1: the most likely), and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsOnePosition = dict[int, Logprob]
"""Log-probabilities by token id: the chosen token first, then the most likely tokens."""


class RequestMetrics(_Output, gc=False):
    """Times of a request, in seconds of `time.time()`; None for a moment that has not come yet."""

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None

    @property
    def first_token_ts(self) -> float:
        """The time of the first token; 0 if there is none yet."""
        return self.first_token_time or 0.0

    @property
    def last_token_ts(self) -> float:
        """The time of the last token; 0 if there is none yet."""
        return self.last_token_time or 0.0

    @property
    def first_token_latency(self) -> float:
        """The seconds from arrival to the first token; 0 if there is none yet."""
        return 0.0 if self.first_token_time is None else self.first_token_time - self.arrival_time

    __getattr__ = refuse_attributes(
        {
            **dict.fromkeys(
                (
                    *("queued_ts", "scheduled_ts", "first_scheduled_time", "time_in_queue", "scheduler_time"),
                    *("model_forward_time", "model_execute_time", "num_preemptions"),
                ),
                "the core does not time single requests; /metrics and stat_loggers have these figures of all",
            ),
            "num_generation_tokens": "count the token_ids of the completions",
            "is_corrupted": "a request with NaN among its scores fails",
        }
    )


class CompletionOutput(_Output, gc=False):
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
    routed_experts: None = None
    """None: steps return no experts."""
    finish_reason: str | None = None
    """None while the completion runs, then "stop", "length", "abort" or "error"."""
    stop_reason: int | str | None = None
    """The stop string or token id that ended the completion; None for the tokenizer's end-of-sequence token."""
    lora_request: LoRARequest | None = None
    """The adapter of the request; None for the base model."""

    def finished(self) -> bool:
        """Return whether the completion has ended."""
        return self.finish_reason is not None


class RequestOutput(_Output, gc=False):
    """The state of a request; with `RequestOutputKind.DELTA` only what is new since the last output.

    The fields have the same order as in vLLM.
    """

    request_id: str
    prompt: str | None
    """The prompt's text, if the caller gave text."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[LogprobsOnePosition | None] | None
    """An entry for each prompt token, None for the first token, if the request asks for it; with DELTA in the first
    output only."""
    outputs: list[CompletionOutput]
    finished: bool
    """True in the last output: all completions have ended."""
    metrics: RequestMetrics | None = None
    lora_request: LoRARequest | None = None
    """The adapter of the request; None for the base model."""
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    """None, as `encoder_prompt`: no model that is served has an encoder and a decoder."""
    num_cached_tokens: int | None = None
    """Number of prompt tokens that the prefix cache held."""
    kv_transfer_params: dict[str, Any] | None = None
    """None: a KV cache stays with its core."""


class RequestFailure(msgspec.Struct, gc=False):
    """The end of a request that failed, instead of an output, from `StreamGroup` and `LLM`."""

    request_id: str
    error: Exception
    """What `AsyncLLM.generate` would raise."""
    finished: bool = True

    @property
    def outputs(self) -> NoReturn:
        """Raise `error`, as all further fields of an output do: code which expects an output fails with the cause."""
        raise self.error

    prompt = prompt_token_ids = prompt_logprobs = metrics = num_cached_tokens = lora_request = outputs
    encoder_prompt = encoder_prompt_token_ids = kv_transfer_params = outputs


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
