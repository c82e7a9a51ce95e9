"""A thread that ends a core whose main thread waits for a device while another rank has ended.

On GPUs the sum that a dead rank leaves open never completes, and the host waits for it in the driver. On CPUs the main
thread itself looks at the ranks while it waits.
"""

import logging
import os
import select
import threading
from collections.abc import Callable
from typing import Final

logger = logging.getLogger(__name__)

_GRACE_S: Final = 2.0
"""Time in which the main thread may find out by itself and end the core with its own words."""


def watch_ranks(
    pids: dict[int, int], stopped: threading.Event, end: Callable[[int], object] = os._exit, grace_s: float = _GRACE_S
) -> threading.Thread:
    """Start the thread, which calls `end(1)` when a process of `pids`, by rank, has ended and `stopped` is not set.

    `stopped` must be set before the ranks are told to end. `grace_s` seconds pass between the end of the rank and that
    of the core.
    """
    descriptors = {os.pidfd_open(pid): rank for rank, pid in pids.items()}
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)

    def watch() -> None:
        ended = [descriptors[descriptor] for descriptor, _ in poll.poll()]
        for descriptor in descriptors:
            os.close(descriptor)
        if not stopped.wait(grace_s):
            logger.error("rank %d (process %d) has ended, and with it the core", ended[0], pids[ended[0]])
            end(1)

    thread = threading.Thread(target=watch, name="rank-watch", daemon=True)
    thread.start()
    return thread
