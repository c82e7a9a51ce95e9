"""The client's lines in the log: throughput and load every few seconds, and each request when it is sent."""

import logging
import time

from vllm_mp.client.engine.supervisor import CoreSupervisor
from vllm_mp.client.outputs.output_processor import OutputProcessor
from vllm_mp.client.outputs.stream import RequestStream
from vllm_mp.client.stats import EngineStats
from vllm_mp.config import ObservabilityConfig

logger = logging.getLogger(__name__)


class StatLogger:
    """Writes lines about the statistics: on request, and every 10 seconds while tokens arrive."""

    def __init__(
        self,
        config: ObservabilityConfig,
        supervisor: CoreSupervisor,
        requests: OutputProcessor,
        stats: EngineStats,
    ) -> None:
        self._config = config
        self._supervisor = supervisor
        self._requests = requests
        self._stats = stats
        self._last = self._tokens()
        self._since = time.monotonic()
        if not config.disable_log_stats:
            stats.add_report(self.write)

    def write(self) -> None:
        """Write a line about the time since the last line, and about the load now."""
        now, tokens = time.monotonic(), self._tokens()
        seconds = max(now - self._since, 1e-9)
        prompt, generated, queries, hits = (new - old for new, old in zip(tokens, self._last, strict=True))
        parts = [f"{len(self._requests)} live requests", f"{prompt / seconds:.1f} prompt tokens/s"]
        parts += [f"{generated / seconds:.1f} tokens/s generated"]
        status = self._supervisor.status()
        if status and status.total_blocks:
            parts += [f"KV cache {1 - status.free_blocks / status.total_blocks:.1%} in use"]
        if queries:
            parts += [f"prefix cache hits {hits / queries:.1%}"]
        logger.info("%s", ", ".join(parts))
        self._since, self._last = now, tokens

    def log_request(self, stream: RequestStream) -> None:
        """Write a line about a request that was sent, unless `disable_log_requests`.

        What the caller wrote is in it only with `max_log_len`: prompts, stop strings and other texts may be private.
        """
        if self._config.disable_log_requests or not logger.isEnabledFor(logging.INFO):
            return
        length, num_tokens = self._config.max_log_len, len(stream.prompt_token_ids)
        if length is None:
            logger.info("request %s: %d tokens", stream.request_id, num_tokens)
        else:
            prompt = None if stream.prompt is None else stream.prompt[:length]
            logger.info("request %s: %d tokens, prompt %r, %s", stream.request_id, num_tokens, prompt, stream.params)

    def _tokens(self) -> tuple[float, float, float, float]:
        stats = self._stats
        return (
            stats.prompt_tokens.value,
            stats.generation_tokens.value,
            stats.prefix_cache_queries.value,
            stats.prefix_cache_hits.value,
        )
