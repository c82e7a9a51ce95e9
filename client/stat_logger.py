"""What the engine is doing, as a line in the log now and then."""

import logging
import time

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0


class StatsLog:
    """Counts tokens and writes a line at most every ten seconds, only while tokens come."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._num_tokens = 0

    def count(self, num_tokens: int) -> bool:
        """Add tokens that have arrived; True when a line is due."""
        self._num_tokens += num_tokens
        return time.monotonic() - self._since >= INTERVAL_S

    def write(self, num_live: int, free_blocks: float | None) -> None:
        """Write a line about the time since the last one.

        `num_live` is the number of live requests of this client, `free_blocks` the share of the KV cache that is free,
        None where it is not known.
        """
        now = time.monotonic()
        rate = self._num_tokens / max(now - self._since, 1e-9)
        cache = "" if free_blocks is None else f", KV cache {1 - free_blocks:.1%} in use"
        logger.info("%d live requests, %.1f tokens/s generated%s", num_live, rate, cache)
        self._since, self._num_tokens = now, 0
