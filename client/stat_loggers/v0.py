"""Loggers that were written for vLLM's V0 engine: their `log` takes the statistics of a step."""

import inspect
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from vllm_mp.client.stat_loggers.base import StatLoggerBase
from vllm_mp.client.stats import IterationStats, SchedulerStats
from vllm_mp.config import VllmConfig


@dataclass(slots=True)
class Stats:
    """The statistics of V0, under its names. There is no swapping, so what concerns it is 0. Times are in seconds."""

    now: float
    num_running_sys: int = 0
    num_waiting_sys: int = 0
    num_swapped_sys: int = 0
    gpu_cache_usage_sys: float = 0.0
    cpu_cache_usage_sys: float = 0.0
    cpu_prefix_cache_hit_rate: float = -1.0
    gpu_prefix_cache_hit_rate: float = -1.0
    """Share of the tokens of all prompts so far that the prefix cache held; -1 before the first."""
    num_prompt_tokens_iter: int = 0
    num_generation_tokens_iter: int = 0
    num_tokens_iter: int = 0
    time_to_first_tokens_iter: list[float] = field(default_factory=list)
    time_per_output_tokens_iter: list[float] = field(default_factory=list)
    num_preemption_iter: int = 0
    time_e2e_requests: list[float] = field(default_factory=list)
    time_queue_requests: list[float] = field(default_factory=list)
    time_inference_requests: list[float] = field(default_factory=list)
    time_prefill_requests: list[float] = field(default_factory=list)
    time_decode_requests: list[float] = field(default_factory=list)
    num_prompt_tokens_requests: list[int] = field(default_factory=list)
    num_generation_tokens_requests: list[int] = field(default_factory=list)
    n_requests: list[int] = field(default_factory=list)
    max_num_generation_tokens_requests: list[int] = field(default_factory=list)
    max_tokens_requests: list[int] = field(default_factory=list)
    finished_reason_requests: list[str] = field(default_factory=list)
    waiting_lora_adapters: list[str] = field(default_factory=list)
    running_lora_adapters: list[str] = field(default_factory=list)
    max_lora: str = "0"
    spec_decode_metrics: Any = None


class V0StatLoggerBase(ABC):
    """The base of V0's loggers."""

    def __init__(self, local_interval: float, vllm_config: VllmConfig) -> None:
        self.num_prompt_tokens: list[int] = []
        self.num_generation_tokens: list[int] = []
        self.last_local_log = time.time()
        self.local_interval = local_interval
        self.spec_decode_metrics = None

    @abstractmethod
    def log(self, stats: Stats) -> None:
        """Take in what has happened since the last call, at most ten times a second."""

    @abstractmethod
    def info(self, type: str, obj: Any) -> None:
        """Take note of a part of the configuration: "cache_config", when the logger is added."""


def is_v0(logger: Any) -> bool:
    """Return whether the logger's `log` takes the statistics."""
    try:
        parameters = inspect.signature(logger.log).parameters.values()
    except (AttributeError, TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(each.kind in positional and each.default is inspect.Parameter.empty for each in parameters)


class V0Adapter(StatLoggerBase):
    """Calls a logger of V0."""

    def __init__(self, logger: Any, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        self._logger = logger
        self._num_queries = self._num_hits = 0

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if iteration_stats is not None:
            self._logger.log(self._stats(scheduler_stats or SchedulerStats(), iteration_stats))

    def log_engine_initialized(self) -> None:
        if hasattr(self._logger, "info"):
            self._logger.info("cache_config", self.vllm_config.cache_config)

    def _stats(self, scheduler: SchedulerStats, iteration: IterationStats) -> Stats:
        self._num_queries += iteration.prefix_cache.queries
        self._num_hits += iteration.prefix_cache.hits
        finished = iteration.finished_requests
        lora_config = self.vllm_config.lora_config
        return Stats(
            now=iteration.iteration_timestamp,
            num_running_sys=scheduler.num_running_reqs,
            num_waiting_sys=scheduler.num_waiting_reqs,
            gpu_cache_usage_sys=scheduler.kv_cache_usage,
            gpu_prefix_cache_hit_rate=self._num_hits / self._num_queries if self._num_queries else -1.0,
            num_prompt_tokens_iter=iteration.num_prompt_tokens,
            num_generation_tokens_iter=iteration.num_generation_tokens,
            num_tokens_iter=iteration.num_prompt_tokens + iteration.num_generation_tokens,
            time_to_first_tokens_iter=iteration.time_to_first_tokens_iter,
            time_per_output_tokens_iter=iteration.time_per_output_tokens_iter,
            num_preemption_iter=iteration.num_preempted_reqs,
            time_e2e_requests=[request.e2e_latency for request in finished],
            time_queue_requests=[request.queued_time for request in finished],
            time_inference_requests=[request.inference_time for request in finished],
            time_prefill_requests=[request.prefill_time for request in finished],
            time_decode_requests=[request.decode_time for request in finished],
            num_prompt_tokens_requests=[request.num_prompt_tokens for request in finished],
            num_generation_tokens_requests=[request.num_generation_tokens for request in finished],
            n_requests=iteration.n_params_iter,
            max_num_generation_tokens_requests=iteration.max_num_generation_tokens_iter,
            max_tokens_requests=[
                request.max_tokens_param for request in finished if request.max_tokens_param is not None
            ],
            finished_reason_requests=[str(request.finish_reason) for request in finished],
            waiting_lora_adapters=list(scheduler.waiting_lora_adapters),
            running_lora_adapters=list(scheduler.running_lora_adapters),
            max_lora=str(getattr(lora_config, "max_loras", 0)),
        )
