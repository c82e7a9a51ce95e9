"""The logger that writes lines about throughput and load to the log."""

import logging
import time

from vllm_mp.client.stat_loggers.base import CounterLogger
from vllm_mp.client.stat_loggers.readings import EngineReadings
from vllm_mp.config import VllmConfig

logger = logging.getLogger(__name__)


class LoggingStatLogger(CounterLogger):
    """Writes a line about the time since the last line, and about the load now."""

    default_name = "logging"

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        super().__init__(vllm_config, engine_index)
        self._since = time.monotonic()

    def attach(self, engine: EngineReadings) -> None:
        super().attach(engine)
        self._last = self._tokens()

    def log(self) -> None:
        """Write a line."""
        now, tokens = time.monotonic(), self._tokens()
        seconds = max(now - self._since, 1e-9)
        prompt, generated, queries, hits = (new - old for new, old in zip(tokens, self._last, strict=True))
        parts = [f"{self._engine.num_live_requests} live requests", f"{prompt / seconds:.1f} prompt tokens/s"]
        parts += [f"{generated / seconds:.1f} tokens/s generated"]
        load = self._engine.core_load()
        if load is not None and load.total_blocks:
            parts += [f"KV cache {load.kv_cache_usage:.1%} in use"]
        if queries:
            parts += [f"prefix cache hits {hits / queries:.1%}"]
        logger.info("%s", ", ".join(parts))
        self._since, self._last = now, tokens

    def _tokens(self) -> tuple[float, float, float, float]:
        stats = self._engine.stats
        return (
            stats.prompt_tokens.value,
            stats.generation_tokens.value,
            stats.prefix_cache_queries.value,
            stats.prefix_cache_hits.value,
        )
