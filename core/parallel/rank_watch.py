"""A thread that ends a core whose main thread waits for a device while another rank has ended.

On GPUs the sum that a dead rank leaves open never completes, and the host waits for it in the driver. On CPUs the main
thread itself looks at the ranks while it waits.
"""

import logging
import os
import threading
from collections.abc import Callable
from typing import Final

from vllm_mp.core.parallel.rank_state import WorkerFailedError

logger = logging.getLogger(__name__)

_LOOK_S: Final = 1.0
_GRACE_S: Final = 2.0
"""Time in which the main thread may find out by itself and end the core with its own words."""


def watch_ranks(
    look: Callable[[], None],
    stopped: threading.Event,
    end: Callable[[int], object] = os._exit,
    look_s: float = _LOOK_S,
    grace_s: float = _GRACE_S,
) -> threading.Thread:
    """Start the thread, which calls `look` every `look_s` seconds until `stopped` is set.

    If `look` raises, as `Ranks.look` does for a rank that has ended, it calls `end(1)` after `grace_s` seconds, unless
    `stopped` has been set. `stopped` must be set before the ranks are told to end.
    """

    def watch() -> None:
        while not stopped.wait(look_s):
            try:
                look()
            except (WorkerFailedError, ValueError) as error:
                if not stopped.wait(grace_s):
                    logger.error("%s, and with it the core", error)
                    end(1)
                return

    thread = threading.Thread(target=watch, name="rank-watch", daemon=True)
    thread.start()
    return thread
