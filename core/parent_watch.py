"""The end of a process's parent, for processes that must not outlive it."""

import os
import select
from typing import Final

_CHECK_MS: Final = 500


def wait_for_end_of_parent(pid: int) -> None:
    """Return once the parent `pid` has ended, or closes the other end of standard input.

    Both are watched, because a child that the parent forked may hold that end too. The kernel's parent-death signal
    would not do: it comes when the *thread* that started this process ends.
    """
    poll = select.poll()
    poll.register(0, select.POLLHUP)
    while not poll.poll(_CHECK_MS) and os.getppid() == pid:
        pass
