"""What a client counts: tokens, latencies, the ends of requests, restarts. Knows neither the log nor Prometheus."""

from vllm_mp.client.stats.cells import Cells
from vllm_mp.client.stats.core_reading import CoreReading
from vllm_mp.client.stats.engine_stats import EngineStats, Restart
from vllm_mp.client.stats.finished_request import FinishedRequest
from vllm_mp.client.stats.iteration_stats import (
    FinishedRequestStats,
    FinishReason,
    IterationStats,
    PrefixCacheStats,
    PromptTokenStats,
    SchedulerStats,
)
from vllm_mp.client.stats.metrics import Counter, Histogram
from vllm_mp.client.stats.restart_counter import RestartCounter

__all__ = [
    "Cells",
    "CoreReading",
    "Counter",
    "EngineStats",
    "FinishReason",
    "FinishedRequest",
    "FinishedRequestStats",
    "Histogram",
    "IterationStats",
    "PrefixCacheStats",
    "PromptTokenStats",
    "Restart",
    "RestartCounter",
    "SchedulerStats",
]
