"""The lines of the log about the work of a shared core."""

import logging
import time
from typing import NamedTuple

from vllm_mp.core.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

_INTERVAL_NS = 10 * 10**9
_NEVER = 2**63


class _Totals(NamedTuple):
    """Tokens since the start of the core."""

    prompt: int
    cached: int
    """Tokens of prompts that the prefix cache held."""
    generated: int


class ActivityLog:
    """Writes a line every ten seconds while there is work. Times are in nanoseconds of `time.monotonic_ns()`."""

    def __init__(self, scheduler: Scheduler, is_on: bool) -> None:
        self._scheduler = scheduler
        self.num_generated = 0
        """Tokens that requests have got."""
        self._since = time.monotonic_ns()
        self._last = self._totals()
        self.due = self._since + _INTERVAL_NS if is_on else _NEVER
        """When the next line is due."""

    def write(self, now: int) -> None:
        """Write a line about the time since the last line; call this when it is due."""
        scheduler, totals = self._scheduler, self._totals()
        seconds = (now - self._since) / 1e9
        prompt, cached, generated = (new - old for new, old in zip(totals, self._last, strict=True))
        blocks = scheduler.cache.pool
        logger.info(
            "%d running, %d waiting, %.1f prompt tokens/s, %.1f tokens/s generated, KV cache %.1f%% in use%s",
            scheduler.num_running,
            scheduler.num_waiting,
            prompt / seconds,
            generated / seconds,
            100 * (1 - blocks.num_free / max(1, blocks.num_blocks)),
            f", prefix cache hits {cached / prompt:.1%}" if prompt else "",
        )
        self._begin(now, totals)

    def note_idle(self) -> None:
        """Write the line about the work that has ended when it is due; begin again while there was no work."""
        if self.due != _NEVER:
            now, totals = time.monotonic_ns(), self._totals()
            if totals == self._last:
                self._begin(now, totals)
            elif now >= self.due:
                self.write(now)

    def _begin(self, now: int, totals: _Totals) -> None:
        self._since, self._last, self.due = now, totals, now + _INTERVAL_NS

    def _totals(self) -> _Totals:
        cache = self._scheduler.cache
        return _Totals(cache.num_prompt_tokens, cache.num_cached_tokens, self.num_generated)
