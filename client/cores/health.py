"""Signs that a core is not well: a live core without progress, and kills by the kernel because memory ran out."""

import time
from pathlib import Path

from vllm_mp.core_link.core_status import CoreState
from vllm_mp.core_link.status_page import StatusPage
from vllm_mp.machine.control_group import oom_kills

_IDLE_BEAT_S = 0.75
"""Time that an idle core may take between two beats. It beats every 0.5 s; the rest is a margin."""
_VMSTAT = Path("/proc/vmstat")
"""File in which the kernel counts its kills on the whole machine, among others."""


class HangWatch:
    """Adds up the time during which a core was seen to make no progress.

    Only time that the watcher observed counts, so a core is not blamed if the whole machine was suspended.
    """

    def __init__(self, limit_s: float, pid: int | None, load_limit_s: float = 0.0) -> None:
        """`limit_s`: seconds without progress that make a hang; `load_limit_s`: the same for a core that loads.

        `pid`: the core's process, to detect that a signal has stopped it; None if it is unknown.
        """
        self.interval_s = min(0.25, limit_s / 4)
        """Seconds between two observations."""
        self._limit_s = limit_s
        self._load_limit_s = load_limit_s
        self._pid = pid
        self._last_look = time.monotonic()
        self._last_seen: object = None
        self._still_s = 0.0
        """Seconds without progress so far."""

    def is_hung(self, page: StatusPage, has_work: bool) -> bool:
        """Return whether the core has had work and made no progress for too long; call this every `interval_s`."""
        seen = page.progress() if has_work else None
        slack = 0.0 if page.state == CoreState.STEPPING else _IDLE_BEAT_S
        if page.state == CoreState.LOADING and not is_stopped(self._pid):
            slack = max(slack, self._load_limit_s - self._limit_s)  # parts of loading do not beat
        return self._made_no_progress(seen, slack)

    def is_stopped_for_too_long(self) -> bool:
        """Return whether a signal has kept the process stopped for too long; call this every `interval_s`.

        Before the core has a status page, this is the only sign of a hang.
        """
        return self._made_no_progress("stopped" if is_stopped(self._pid) else None, 0.0)

    def _made_no_progress(self, seen: object, slack: float) -> bool:
        """Add the time since the last call if `seen` has not changed; return whether the limit is exceeded.

        `seen` is a value that changes with progress, or None if no progress is due. `slack` is added to the limit, in
        seconds.
        """
        now = time.monotonic()
        elapsed, self._last_look = now - self._last_look, now
        if seen is None or seen != self._last_seen:
            self._last_seen = seen
            self._still_s = 0.0
        else:
            self._still_s += min(elapsed, 2 * self.interval_s)
        return self._still_s > self._limit_s + slack


def is_stopped(pid: int | None) -> bool:
    """Return whether a signal or a debugger has stopped the process; False if the system does not tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


def count_oom_kills() -> int:
    """Return the number of processes that the kernel has killed because memory ran out; 0 if it does not tell.

    They are those of this process's control group, or else of the machine.
    """
    if (count := oom_kills()) is not None:
        return count
    try:
        lines = _VMSTAT.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
