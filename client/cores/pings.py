"""Pings that find out whether a shared core hangs, for a client that does not see its status page."""

import asyncio
import contextlib
import weakref
from collections.abc import Callable

_SILENT_TICKS = 4
"""Number of ticks without a message after which a ping is due."""


class Pings:
    """Counts ticks of the event loop during which no message arrived, and pings the core when there are some.

    The supervisor's thread asks for each tick, and the loop counts it. So time during which the loop is blocked does
    not count: messages may have arrived in that time.
    """

    def __init__(self, ping: weakref.WeakMethod[Callable[[], None]]) -> None:
        """`ping` sends a call to the core, which answers between two steps; called on the event loop.

        The reference is weak, so that the supervisor does not keep a client alive that its owner has dropped.
        """
        self._ping = ping
        self._num_silent = 0
        """Number of ticks since the latest message."""
        self._asked: asyncio.AbstractEventLoop | None = None
        """The loop that has not run the latest tick yet."""

    def reset(self) -> None:
        """Begin to count again: a message has arrived, or there is another core."""
        self._num_silent = 0

    def look(self, loop: asyncio.AbstractEventLoop | None, has_work: bool) -> int:
        """Return the number of ticks since the latest message, and ask `loop` for another tick; from any thread.

        Without work the core need not answer.
        """
        if not has_work:
            self.reset()
        elif loop is not None and loop is not self._asked:
            self._asked = loop
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(self._tick)
        return self._num_silent

    def _tick(self) -> None:
        self._asked = None
        self._num_silent += 1
        ping = self._ping()
        if ping is not None and self._num_silent % _SILENT_TICKS == 0:
            ping()
