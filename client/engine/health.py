"""Whether a core that lives makes progress."""

import time
from pathlib import Path

from vllm_mp.status_page import CoreState, StatusPage

_IDLE_BEAT_S = 0.75
"""A core without work beats every half second."""


class HangWatch:
    """Adds up the time over which a core was seen to stand still.

    Only time that the watcher has seen counts: no core is to blame where the whole machine slept.
    """

    def __init__(self, limit_s: float, pid: int | None, load_limit_s: float = 0.0) -> None:
        """`limit_s`: seconds of standing still that make a hang; `load_limit_s`: those of a core that loads."""
        self.interval_s = min(0.25, limit_s / 4)
        """Seconds between two looks."""
        self._limit_s = limit_s
        self._load_limit_s = load_limit_s
        self._pid = pid
        self._last_look = time.monotonic()
        self._last_seen: object = None
        self._still_s = 0.0

    def is_hung(self, page: StatusPage, has_work: bool) -> bool:
        """Whether the core has stood still with work to do for too long; to be asked every `interval_s`."""
        seen = page.progress() if has_work else None
        slack = 0.0 if page.state == CoreState.STEPPING else _IDLE_BEAT_S
        if page.state == CoreState.LOADING and not is_stopped(self._pid):
            slack = max(slack, self._load_limit_s - self._limit_s)  # not all that loading takes beats
        return self._has_stood_still(seen, slack)

    def is_stopped_for_too_long(self) -> bool:
        """Whether the process has been stopped by a signal for too long, all that can be said of one that loads."""
        return self._has_stood_still("stopped" if is_stopped(self._pid) else None, 0.0)

    def _has_stood_still(self, seen: object, slack: float) -> bool:
        """`seen`: what would have changed; None if there is nothing that should change."""
        now = time.monotonic()
        elapsed, self._last_look = now - self._last_look, now
        if seen is None or seen != self._last_seen:
            self._last_seen = seen
            self._still_s = 0.0
        else:
            self._still_s += min(elapsed, 2 * self.interval_s)
        return self._still_s > self._limit_s + slack


def is_stopped(pid: int | None) -> bool:
    """Whether a signal or a debugger has stopped the process; False where the system does not tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False
