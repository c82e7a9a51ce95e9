"""Signs that a core is not well: a live core without progress, and processes that the kernel killed for memory."""

import time
from pathlib import Path

from vllm_mp.status_page import CoreState, StatusPage

_IDLE_BEAT_S = 0.75
"""An idle core beats every 0.5 s; this leaves it a margin."""
_OOM_FILES = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))
"""Where the kernel counts kills: for this container, or else for the machine."""


class HangWatch:
    """Adds up the time over which a core was seen without progress.

    Only time that the watcher observed counts, so a core is not blamed if the whole machine was suspended.
    """

    def __init__(self, limit_s: float, pid: int | None, load_limit_s: float = 0.0) -> None:
        """`limit_s`: seconds without progress that make a hang; `load_limit_s`: the same for a core that loads."""
        self.interval_s = min(0.25, limit_s / 4)
        """Seconds between two observations."""
        self._limit_s = limit_s
        self._load_limit_s = load_limit_s
        self._pid = pid
        self._last_look = time.monotonic()
        self._last_seen: object = None
        self._still_s = 0.0

    def is_hung(self, page: StatusPage, has_work: bool) -> bool:
        """Whether the core has had work and made no progress for too long; call it every `interval_s`."""
        seen = page.progress() if has_work else None
        slack = 0.0 if page.state == CoreState.STEPPING else _IDLE_BEAT_S
        if page.state == CoreState.LOADING and not is_stopped(self._pid):
            slack = max(slack, self._load_limit_s - self._limit_s)  # parts of loading do not beat
        return self._made_no_progress(seen, slack)

    def is_stopped_for_too_long(self) -> bool:
        """Whether a signal has kept the process stopped for too long: the only sign of a hang before a page exists."""
        return self._made_no_progress("stopped" if is_stopped(self._pid) else None, 0.0)

    def _made_no_progress(self, seen: object, slack: float) -> bool:
        """`seen`: a value that changes with progress, or None if no progress is due; `slack`: seconds on top."""
        now = time.monotonic()
        elapsed, self._last_look = now - self._last_look, now
        if seen is None or seen != self._last_seen:
            self._last_seen = seen
            self._still_s = 0.0
        else:
            self._still_s += min(elapsed, 2 * self.interval_s)
        return self._still_s > self._limit_s + slack


def is_stopped(pid: int | None) -> bool:
    """Whether a signal or a debugger has stopped the process; False if the system does not tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


def count_oom_kills() -> int:
    """Return the number of processes that the kernel has killed because memory ran out; 0 if it does not tell."""
    for file in _OOM_FILES:
        try:
            lines = file.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0
