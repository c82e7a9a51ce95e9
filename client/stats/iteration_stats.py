"""The records for a stat logger: the load of the core, and what has happened since the last record.

Fields have vLLM's names. Times are in seconds; a count that the engine has no part for is 0 or None, as in vLLM without
that part.
"""

import time
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True)
class PrefixCacheStats:
    """Prompts that were looked up in the prefix cache."""

    reset: bool = False
    """Always False: a client does not see when another client empties the cache."""
    requests: int = 0
    queries: int = 0
    """Tokens of the prompts."""
    hits: int = 0
    """Tokens of the prompts that the cache held."""


@dataclass(slots=True)
class PromptTokenStats:
    """Tokens of prompts whose first output token or vector has arrived."""

    computed: int = 0
    local_cache_hit: int = 0
    """Tokens that the prefix cache held."""
    external_kv_transfer: int = 0
    total: int = 0

    @property
    def cached_tokens(self) -> int:
        return self.local_cache_hit + self.external_kv_transfer


@dataclass(slots=True)
class FinishedRequestStats:
    """A request that has ended, for whatever reason. A time is 0 if the request did not get that far."""

    finish_reason: FinishReason
    request_id: str | None = None
    e2e_latency: float = 0.0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    """Tokens of all completions together."""
    max_tokens_param: int | None = None
    queued_time: float = 0.0
    prefill_time: float = 0.0
    inference_time: float = 0.0
    decode_time: float = 0.0
    mean_time_per_output_token: float = 0.0
    is_corrupted: bool = False
    """Always False: a request whose logits are not finite fails."""
    num_cached_tokens: int = 0


@dataclass(slots=True)
class SchedulerStats:
    """The load of the core, over all its clients."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    step_counter: int = 0
    current_wave: int = 0
    kv_cache_usage: float = 0.0
    """Share of the KV cache's blocks in use, 0 to 1."""
    prefix_cache_stats: PrefixCacheStats = field(default_factory=PrefixCacheStats)
    connector_prefix_cache_stats: PrefixCacheStats | None = None
    kv_cache_eviction_events: list[Any] = field(default_factory=list)
    spec_decoding_stats: Any = None
    kv_connector_stats: dict[str, Any] | None = None
    ec_connector_stats: dict[str, Any] | None = None
    waiting_lora_adapters: dict[str, int] = field(default_factory=dict)
    """Requests of this client that wait for their first output, by the name of their adapter."""
    running_lora_adapters: dict[str, int] = field(default_factory=dict)
    """The others that are live."""
    cudagraph_stats: Any = None
    perf_stats: Any = None
    iteration_details: Any = None

    @property
    def gpu_cache_usage(self) -> float:
        """`kv_cache_usage` under its older name."""
        return self.kv_cache_usage


class IterationStats:
    """What has happened to the requests of a client, in one step or in several."""

    def __init__(self) -> None:
        self.iteration_timestamp = time.time()
        self.num_generation_tokens = 0
        self.prompt_token_stats = PromptTokenStats()
        self.prefix_cache = PrefixCacheStats()
        self.num_preempted_reqs = 0
        """Preemptions over all clients of the core, as far as it has told."""
        self.finished_requests: list[FinishedRequestStats] = []
        self.max_num_generation_tokens_iter: list[int] = []
        """Tokens of the longest completion, of each request that ended with "stop" or "length"."""
        self.n_params_iter: list[int] = []
        """The parameter `n` of the same requests."""
        self.time_to_first_tokens_iter: list[float] = []
        self.num_corrupted_reqs = 0
        """Always 0: a request whose logits are not finite fails."""
        self.intervals: list[tuple[float, int]] = []
        """Times between two tokens, each with the number of completions for which it was the same."""

    @property
    def is_empty(self) -> bool:
        """Nothing has happened."""
        return not (self.num_generation_tokens or self.finished_requests or self.prompt_token_stats.total)

    @property
    def num_prompt_tokens(self) -> int:
        return self.prompt_token_stats.total

    @cached_property
    def inter_token_latencies_iter(self) -> list[float]:
        """The times between two tokens of a completion; the list is made when it is first read."""
        return [interval for interval, count in self.intervals for _ in range(count)]

    @property
    def time_per_output_tokens_iter(self) -> list[float]:
        """`inter_token_latencies_iter` under its older name."""
        return self.inter_token_latencies_iter

    def __repr__(self) -> str:
        return f"IterationStats({', '.join(f'{name}={value}' for name, value in vars(self).items())})"

    def add_prompt(self, num_tokens: int, num_cached: int, was_looked_up: bool) -> None:
        """Count a prompt whose first output has arrived, and whether it was looked up in the prefix cache."""
        prompts, lookups = self.prompt_token_stats, self.prefix_cache
        prompts.total += num_tokens
        prompts.local_cache_hit += num_cached
        prompts.computed += num_tokens - num_cached
        if was_looked_up:
            lookups.requests += 1
            lookups.queries += num_tokens
            lookups.hits += num_cached

    def add_finished(self, finished: FinishedRequestStats, lengths: list[int]) -> None:
        """Count a request that has ended; `lengths` are the tokens of its completions."""
        self.finished_requests.append(finished)
        if any(lengths) and finished.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.max_num_generation_tokens_iter.append(max(lengths))
            self.n_params_iter.append(len(lengths))
