"""An event loop in a thread of its own, in which blocking callers run coroutines."""

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from vllm_mp.errors import EngineDeadError

Result = TypeVar("Result")

_END_TIMEOUT_S = 5.0
"""Longest wait for the tasks of a loop that ends."""


class LoopThread:
    """Runs an event loop beside its callers, so that they may block in a script, a notebook or another event loop.

    The thread is a daemon. It ends with `close`, when the object is garbage-collected, and at the exit.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-mp-loop", daemon=True)
        self._thread.start()
        self._owner = os.getpid()
        self.close = weakref.finalize(self, _end, self._loop, self._thread, self._owner)
        """Cancel all tasks and end the thread; no-op after the first call, and in a forked child."""

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine to its end and return its result; an interrupt of the caller cancels it.

        Raises what the coroutine raises, and what `check` raises.
        """
        try:
            self.check()
        except BaseException:
            coroutine.close()
            raise
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        """Call `callback(*args)` in the loop. Raises what `check` raises."""
        self.check()
        self._loop.call_soon_threadsafe(callback, *args)

    def check(self) -> None:
        """Raise EngineDeadError after the end of the loop.

        Raises RuntimeError in a forked child, and in the loop's own thread, which must not wait for itself.
        """
        if os.getpid() != self._owner:
            raise RuntimeError(
                f"this engine belongs to process {self._owner}, and this process, {os.getpid()}, was forked from it "
                "later; make an engine after the fork"
            )
        if not self.close.alive:
            raise EngineDeadError("the engine was shut down; make a new one")
        if threading.current_thread() is self._thread:
            raise RuntimeError("a blocking call in the engine's own thread would never return; use another thread")


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread, owner: int) -> None:
    if os.getpid() != owner:
        return

    async def cancel_all() -> None:
        tasks = asyncio.all_tasks(loop) - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_END_TIMEOUT_S)
        loop.stop()

    loop.call_soon_threadsafe(lambda: loop.create_task(cancel_all()))
    if thread is not threading.current_thread():  # the garbage collector may run in it
        thread.join(_END_TIMEOUT_S)
        if not thread.is_alive():
            loop.close()
