"""The end of a process's parent, for processes that must not outlive it."""

import os
import select
from typing import Final

_CHECK_MS: Final = 500


def wait_for_end_of_parent(pid: int) -> None:
    """Return once `parent_has_ended`."""
    while not parent_has_ended(pid, _CHECK_MS):
        pass


def parent_has_ended(pid: int, wait_ms: int = 0) -> bool:
    """Return whether the parent `pid` has ended, or closes the other end of standard input within `wait_ms`.

    Both are watched, because a child that the parent forked may hold that end too. The kernel's parent-death signal
    would not do: it comes when the *thread* that started this process ends.
    """
    poll = select.poll()
    poll.register(0, select.POLLHUP)
    return bool(poll.poll(wait_ms)) or os.getppid() != pid
