"""The statistics that a client keeps of a request until it ends, and their summary at the end."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_mp.client.outputs.stream import RequestStream
from vllm_mp.client.stats.engine_counters import FINISH_REASONS
from vllm_mp.client.stats.finished_request import FinishedRequest
from vllm_mp.client.stats.iteration_stats import FinishedRequestStats, FinishReason
from vllm_mp.requests.sampling_params import SamplingParams


@dataclass(slots=True, eq=False)
class LiveRequest:
    """What is known of a request until it ends. Moments are in seconds of `time.monotonic()`."""

    arrival: float
    sent: float
    trace_headers: Mapping[str, str]
    adapter: str | None
    """The name of its LoRA adapter; None for the base model."""
    queue_s: float | None = None
    first_token: float | None = None
    num_cached_tokens: int = 0
    num_recoveries: int = 0

    def record(self, stream: RequestStream, num_output_tokens: int, reason: str, now: float) -> FinishedRequest:
        """Return the record of the request, which ended `now`."""
        # What is added to a moment gives seconds of `time.time()`.
        epoch = time.time() - now
        return FinishedRequest(
            request_id=stream.request_id,
            params=stream.params,
            arrival_time=self.arrival + epoch,
            sent_time=self.sent + epoch,
            queue_s=self.queue_s,
            first_token_time=None if self.first_token is None else self.first_token + epoch,
            end_time=now + epoch,
            num_prompt_tokens=stream.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=num_output_tokens,
            finish_reason=reason,
            error=None if stream.error is None else str(stream.error),
            num_recoveries=self.num_recoveries,
            trace_headers=self.trace_headers,
        )

    def stats(self, stream: RequestStream, lengths: list[int], reason: str, now: float) -> FinishedRequestStats:
        """Return what stat loggers are told of the request, which ended `now`.

        `lengths` are the numbers of tokens of its completions.
        """
        params, longest = stream.params, max(lengths)
        stats = FinishedRequestStats(
            FinishReason(reason),
            stream.request_id,
            e2e_latency=now - self.arrival,
            num_prompt_tokens=stream.num_prompt_tokens,
            num_generation_tokens=sum(lengths),
            max_tokens_param=params.max_tokens if isinstance(params, SamplingParams) else None,
            num_cached_tokens=self.num_cached_tokens,
        )
        if self.first_token is not None and self.queue_s is not None:
            scheduled, since_first = self.sent + self.queue_s, now - self.first_token
            stats.queued_time = self.queue_s
            stats.prefill_time, stats.inference_time = self.first_token - scheduled, now - scheduled
            stats.decode_time = since_first if longest else 0.0
            stats.mean_time_per_output_token = since_first / (longest - 1) if longest > 1 else 0.0
        return stats


def finish_reason(stream: RequestStream) -> str:
    """Return one of `FINISH_REASONS`; of several completions, that of the worst end."""
    if stream.error is not None:
        return "error"
    reasons = [awaited.finish.reason for awaited in stream.awaited if awaited.finish is not None]
    if len(reasons) == 1 and reasons[0] in FINISH_REASONS:
        return reasons[0]
    # A core may send a reason that does not exist.
    return next((reason for reason in reversed(FINISH_REASONS) if reason in reasons), "stop")
