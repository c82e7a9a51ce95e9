"""The record of a request that has ended."""

from collections.abc import Mapping
from typing import NamedTuple

from vllm_mp.requests.pooling_params import PoolingParams
from vllm_mp.requests.sampling_params import SamplingParams


class FinishedRequest(NamedTuple):
    """What a request took. Moments are in seconds of `time.time()`, durations in seconds."""

    request_id: str
    params: SamplingParams | PoolingParams
    arrival_time: float
    """When the caller had the request, as given or taken by `add_request`."""
    sent_time: float
    """When the request, tokenized, was given to the core, or recorded for the next core."""
    queue_s: float | None
    """Time in the core's waiting queue; None if no step had computed the request when it ended."""
    first_token_time: float | None
    """When the first token of any completion, or the vector, arrived; None if none did."""
    end_time: float
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens that the prefix cache held."""
    num_output_tokens: int
    """Tokens of all completions together."""
    finish_reason: str
    """"stop" or "length"; "abort" if a completion was aborted; "error" if the request failed."""
    error: str | None
    """Why the request failed; None if it did not."""
    num_recoveries: int
    """Deaths of cores after which the request was sent to the next core."""
    trace_headers: Mapping[str, str]

    @property
    def n(self) -> int:
        """Number of completions; 1 for a vector."""
        return self.params.n if isinstance(self.params, SamplingParams) else 1

    @property
    def scheduled_time(self) -> float | None:
        """When a step first computed tokens of the request; None if none did."""
        return None if self.queue_s is None else self.sent_time + self.queue_s
