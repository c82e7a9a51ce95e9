"""A thread for imports and loads, which ends together with the threads of its parallel operations."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

BESIDE_A_CORE: Final = 10
"""The niceness of imports and loads beside a core that serves, which gets nine times as much of a processor."""
_MAX_NICENESS: Final = 19
_LOOK_S: Final = 0.05
"""Time between two looks at what may end a load."""

T = TypeVar("T")


def run_in_thread(call: Callable[[], T], look: Callable[[], None] = lambda: None, niceness: int = 0) -> T:
    """Return the result of `call`, called in a thread of its own that is nicer than this process by `niceness`.

    The threads that its operations start have the same niceness. A process cannot take a niceness back, but this thread
    keeps its own. `look` is called often meanwhile. Raises what `call` and `look` raise.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            if niceness:
                lower_priority(threading.get_native_id(), niceness)
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=run, name="model-loader")
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK_S)
        look()
    return result.result()


def lower_priority(thread_id: int, niceness: int) -> None:
    """Make a thread nicer by `niceness`. Raises OSError if it has ended or belongs to another user."""
    raised = min(_MAX_NICENESS, os.getpriority(os.PRIO_PROCESS, thread_id) + niceness)
    os.setpriority(os.PRIO_PROCESS, thread_id, raised)
