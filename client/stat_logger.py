"""The client's lines in the log: throughput and load every few seconds, and each request when it is sent."""

import logging
import time

from vllm_mp.client.engine.supervisor import CoreSupervisor
from vllm_mp.client.outputs.output_processor import OutputProcessor
from vllm_mp.client.outputs.stream import RequestStream
from vllm_mp.config import ObservabilityConfig

logger = logging.getLogger(__name__)

_INTERVAL_S = 10.0
"""Shortest time between two lines of statistics."""


class StatLogger:
    """Counts tokens, and writes a line at most every 10 seconds, only while tokens arrive."""

    def __init__(self, config: ObservabilityConfig, supervisor: CoreSupervisor, requests: OutputProcessor) -> None:
        self._config = config
        self._supervisor = supervisor
        self._requests = requests
        self._since = time.monotonic()
        self._num_tokens = 0

    def count_tokens(self, num_tokens: int) -> None:
        """Count tokens that have arrived, and write a line if it is due and `disable_log_stats` is off."""
        self._num_tokens += num_tokens
        if time.monotonic() - self._since >= _INTERVAL_S and not self._config.disable_log_stats:
            self.write()

    def write(self) -> None:
        """Write a line about the time since the last line, and about the load now."""
        now = time.monotonic()
        rate = self._num_tokens / max(now - self._since, 1e-9)
        cache, status = "", self._supervisor.status()
        if status and status.total_blocks:
            cache = f", KV cache {1 - status.free_blocks / status.total_blocks:.1%} in use"
        logger.info("%d live requests, %.1f tokens/s generated%s", len(self._requests), rate, cache)
        self._since, self._num_tokens = now, 0

    def log_request(self, stream: RequestStream) -> None:
        """Write a line about a request that was sent, unless `disable_log_requests`."""
        if self._config.disable_log_requests or not logger.isEnabledFor(logging.INFO):
            return
        logger.info(
            "request %s: prompt %r (%d tokens), %s",
            stream.request_id,
            None if stream.prompt is None else stream.prompt[: self._config.max_log_len],
            len(stream.prompt_token_ids),
            stream.params,
        )
