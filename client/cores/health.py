"""Signs that a core is not well: a live core without progress, and kills by the kernel because memory ran out."""

import time
from pathlib import Path

from vllm_mp.client.cores.process_activity import Activity, ProcessActivity, is_ending, is_stopped
from vllm_mp.core_link.core_status import CoreState
from vllm_mp.core_link.status_page import StatusPage
from vllm_mp.machine.control_group import oom_kills

_IDLE_BEAT_S = 0.75
"""Time that an idle core may take between two beats. It beats every 0.5 s; the rest is a margin."""
_LOOK_S = 0.25
"""Time between two observations of a core."""
_STEP_LOOK_S = 0.1
"""The same once a limit of its steps is known."""
_OOM_LOOK_S = 0.5
"""Time between two looks at the number of the kernel's kills, which costs about 1 ms."""
_VMSTAT = Path("/proc/vmstat")
"""File in which the kernel counts its kills on the whole machine, among others."""


class HangWatch:
    """Adds up the time during which a core was seen to make no progress.

    Only time that the watcher observed counts, so a core is not blamed if the whole machine was suspended.

    A core without progress hangs after the limit of its step if its process stands still, and after `limit_s` if the
    process uses its processor, waits for one, or waits for a disk or swapped memory. Where a step may wait for
    something else, as for a device, only a process that a signal has stopped is known to stand still.
    """

    def __init__(self, limit_s: float, pid: int | None, load_limit_s: float = 0.0) -> None:
        """`limit_s`: seconds without progress that make a hang; `load_limit_s`: the same for a core that loads.

        `pid`: the core's process, to detect that it stands still; None if it is unknown.
        """
        self.interval_s = min(_LOOK_S, limit_s / 4)
        """Seconds until the next observation."""
        self._max_gap_s = 2 * self.interval_s
        """Time that counts at most between two observations."""
        self.exceeded = ""
        """The limit that a hung core has exceeded, in words."""
        self._limit_s = limit_s
        self._load_limit_s = load_limit_s
        self._pid = pid
        self._activity = None if pid is None else ProcessActivity(pid)
        self._last_look = time.monotonic()
        self._last_seen: object = None
        self._still_s = 0.0
        """Seconds without progress so far."""
        self._standstill_s = 0.0
        """Seconds of them during which the process has stood still without a break."""
        self._known_limit_s = 0.0
        """The limit of the latest step that had one, in seconds; 0: none had."""

    def is_hung(self, page: StatusPage, has_work: bool) -> bool:
        """Return whether the core has had work and made no progress for too long; call this every `interval_s`."""
        seen = page.progress() if has_work else None
        slack = 0.0 if page.state == CoreState.STEPPING else _IDLE_BEAT_S
        if page.state == CoreState.LOADING and not is_stopped(self._pid):
            slack = max(slack, self._load_limit_s - self._limit_s)  # parts of loading do not beat
        last_look = self._last_look
        if self._made_no_progress(seen, slack):
            self.exceeded = f"{self._limit_s:g} s"
            return True
        return self._stands_still(page, self._last_look - last_look)

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
            self._still_s += min(elapsed, self._max_gap_s)
        return self._still_s > self._limit_s + slack

    def _stands_still(self, page: StatusPage, elapsed: float) -> bool:
        """Return whether the process has stood still for longer than its step may; `elapsed` is since the last look.

        A look that comes late shows that the machine was suspended, or has no time for this process either; counting
        then begins again.
        """
        step_limit_s = page.step_limit_s
        self._known_limit_s = step_limit_s or self._known_limit_s
        is_late = elapsed > 2 * self.interval_s
        is_in_step = page.state == CoreState.STEPPING
        looks_often = self._known_limit_s and is_in_step and self._last_seen is not None
        self.interval_s = min(_STEP_LOOK_S if looks_often else _LOOK_S, self._limit_s / 4)
        if self._activity is None or not self._known_limit_s:
            return False
        if not self._still_s or is_late:
            self._activity.forget()
            self._standstill_s = 0.0
            return False
        activity = self._activity.look(elapsed)
        self._standstill_s = 0.0 if activity is Activity.ACTIVE else self._standstill_s + elapsed
        if activity is Activity.STOPPED:
            limit_s = self._known_limit_s
        elif activity is Activity.BLOCKED and is_in_step and step_limit_s and not page.steps_wait:
            limit_s = step_limit_s
        else:
            return False
        self.exceeded = f"{limit_s:.2g} s, the limit of its step"
        return self._standstill_s > limit_s


class OomKills:
    """Tells whether the kernel may have killed a core because memory ran out.

    The kernel counts its kills in a whole group of processes. Kills before a core was last seen alive did not end it:
    they must not turn a later SIGKILL that another process sends into a sign of what the core's requests do.
    """

    def __init__(self) -> None:
        self._latest = self._before = count_oom_kills()
        self._next_look = 0.0

    def look(self, pid: int) -> None:
        """Note the kills so far, at most every 0.5 s, if the core process `pid` is not ending; call this repeatedly."""
        now = time.monotonic()
        if now < self._next_look or is_ending(pid):
            return
        self._next_look = now + _OOM_LOOK_S
        # The kernel counts a kill just before the process ends, so the core may be the victim of the latest one.
        self._before, self._latest = self._latest, count_oom_kills()

    def note_death(self) -> bool:
        """Return whether there was a kill since the core that has now died was last seen alive."""
        before, count = self._before, count_oom_kills()
        self._before = self._latest = count
        return count > before


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
