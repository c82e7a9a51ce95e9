"""What a consumer of the engine receives."""

from dataclasses import dataclass
from typing import Any


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
    it, `text` does not unless `include_stop_str_in_output` asks for it.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Any]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The state of a request, or with `RequestOutputKind.DELTA` what is new in it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Any] | None] | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
    lora_request: Any = None
