"""The records that stat loggers are given, where programs for vLLM import them from."""

from vllm_mp import IterationStats, SchedulerStats
from vllm_mp.client.stats import FinishedRequestStats, PrefixCacheStats

MultiModalCacheStats = PrefixCacheStats
"""A name for type hints: there are no multimodal inputs, so loggers are given None."""

__all__ = [
    "FinishedRequestStats",
    "IterationStats",
    "MultiModalCacheStats",
    "PrefixCacheStats",
    "SchedulerStats",
]
