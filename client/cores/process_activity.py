"""Whether a process runs, waits for something that is on its way, or stands still, as Linux tells in /proc."""

import contextlib
import enum
import signal
from pathlib import Path

_STATES = {
    "R": "runs or is ready to run",
    "S": "sleeps",
    "D": "waits for a disk or for swapped memory",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "has ended",
}
_ACTIVE_SHARE = 0.05
"""Share of the time for which the threads of a process that gets on run, or wait for a processor, at least."""
_FLAGS, _PENDING_SIGNALS = 6, 28
"""Positions in a file `stat` behind the name of the process (`man 5 proc_pid_stat`)."""
_EXITING = 4
"""The flag of a thread that ends (PF_EXITING)."""
_SIGKILL_BIT = 1 << (signal.SIGKILL - 1)


class Activity(enum.Enum):
    """What a process has done since the look before."""

    ACTIVE = enum.auto()
    """It ran, waited for a processor, a disk or swapped memory, or a debugger holds it; or the system does not tell."""
    BLOCKED = enum.auto()
    """It did none of that: all its threads sleep."""
    STOPPED = enum.auto()
    """A signal has stopped it."""


class ProcessActivity:
    """Looks at the threads of a process time and again."""

    def __init__(self, pid: int) -> None:
        self._tasks = Path(f"/proc/{pid}/task")
        self._last_ns: int | None = None

    def forget(self) -> None:
        """Begin again: what the process did until now does not count in the next look."""
        self._last_ns = None

    def look(self, elapsed_s: float) -> Activity:
        """Return what the process has done in the `elapsed_s` seconds since the look before.

        The first look can only tell whether the process is stopped.
        """
        states, used_ns = "", 0
        try:
            for task in self._tasks.iterdir():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
                    states += _state((task / "stat").read_text())
                    run_ns, delay_ns, _ = (task / "schedstat").read_text().split()
                    used_ns += int(run_ns) + int(delay_ns)
        except (OSError, ValueError, IndexError):
            self._last_ns = None
            return Activity.STOPPED if states and set(states) == {"T"} else Activity.ACTIVE
        last_ns, self._last_ns = self._last_ns, used_ns
        if states and set(states) == {"T"}:
            return Activity.STOPPED
        if last_ns is None or set(states) != {"S"}:
            return Activity.ACTIVE
        return Activity.ACTIVE if used_ns - last_ns > 1e9 * _ACTIVE_SHARE * elapsed_s else Activity.BLOCKED


def is_stopped(pid: int | None) -> bool:
    """Return whether a signal or a debugger has stopped the process; False if the system does not tell."""
    try:
        return _state(Path(f"/proc/{pid}/stat").read_text()) in ("T", "t")
    except (OSError, IndexError):
        return False


def is_ending(pid: int) -> bool:
    """Return whether the process has ended, or will without executing another instruction of its own.

    The system may then still take back its memory, for seconds. False if the system does not tell.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        will_end = int(fields[_FLAGS]) & _EXITING or int(fields[_PENDING_SIGNALS]) & _SIGKILL_BIT
        return fields[0] in ("Z", "X") or bool(will_end)
    except FileNotFoundError:
        return True
    except (OSError, ValueError, IndexError):
        return False


def describe_activity(pid: int) -> str:
    """Return the state of the process in words, and the function of the kernel in which its main thread waits."""
    process = Path(f"/proc/{pid}")
    try:
        state = _state((process / "stat").read_text())
    except (OSError, IndexError):
        return "in a state that the system does not tell"
    with contextlib.suppress(OSError):
        if (where := (process / "wchan").read_text().strip()) not in ("", "0"):
            return f"state {state}: {_STATES.get(state, 'unknown')}, in {where}"
    return f"state {state}: {_STATES.get(state, 'unknown')}"


def _state(stat: str) -> str:
    """Return the letter of the state in the content of a file `stat`."""
    return stat.rpartition(")")[2].split()[0]
