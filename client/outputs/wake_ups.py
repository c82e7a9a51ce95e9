"""The wake-ups of consumers, spread over the turns of the event loop."""

import asyncio
from typing import Protocol

MAX_PER_TURN = 64
"""Number of consumers that are woken in a turn of the event loop. All of them run in its next turn, each of them for a
few microseconds if it does little with its output."""


class Waiter(Protocol):
    """What waits for an output: the future of a waiting consumer, or an object that takes the output for it."""

    def done(self) -> bool: ...

    def get_loop(self) -> asyncio.AbstractEventLoop: ...

    def set_result(self, result: None, /) -> None: ...


class WakeUps:
    """Wakes consumers, a limited number in each turn of the event loop, so that other callbacks run in between.

    Tokens that arrive before a consumer is woken belong to its next output.
    """

    __slots__ = ("_loop", "_waiters")

    def __init__(self) -> None:
        self._waiters: list[Waiter] = []
        """Waiters to complete, in the order of their outputs. The compiled output path appends to this list; `start`
        must be called afterwards."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop that is about to call `_wake_some`."""

    def add(self, waiter: Waiter) -> None:
        """Complete `waiter` in a later turn of the running event loop; at once without a loop."""
        self._waiters.append(waiter)
        self.start()

    async def turn(self) -> None:
        """Return in a later turn of the event loop, after the consumers that are to be woken already."""
        waiter = asyncio.get_running_loop().create_future()
        self.add(waiter)
        await waiter

    def start(self) -> None:
        """Complete the waiters in later turns of the running event loop; at once without a loop."""
        loop = asyncio._get_running_loop()
        if not self._waiters or (loop is not None and loop is self._loop):
            return
        self._loop = loop
        if loop is not None:
            loop.call_soon(self._wake_some)
        else:
            self._wake(len(self._waiters))

    def _wake_some(self) -> None:
        self._loop = None
        self._wake(MAX_PER_TURN)
        self.start()

    def _wake(self, count: int) -> None:
        waiters = self._waiters[:count]
        del self._waiters[:count]
        for waiter in waiters:
            set_done(waiter)


def set_done(waiter: Waiter) -> None:
    """Complete a waiter, unless its consumer was cancelled or its event loop is closed."""
    if not waiter.done() and not waiter.get_loop().is_closed():
        waiter.set_result(None)
