"""Calls between an event loop and other threads."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def make_async(func: Callable[P, T], executor: Executor | None = None) -> Callable[P, Awaitable[T]]:
    """Return a function that runs `func` in a thread of `executor`, and returns an awaitable of its result.

    Without an `executor`, the running loop's own is used. Cancelling the awaitable does not end a call that has begun.
    """

    @functools.wraps(func)
    def call(*args: P.args, **kwargs: P.kwargs) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(executor, functools.partial(func, *args, **kwargs))

    return call


def in_loop(event_loop: asyncio.AbstractEventLoop) -> bool:
    """Return whether the caller runs in `event_loop`."""
    return asyncio._get_running_loop() is event_loop


def run_in_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *args: Any) -> None:
    """Call `function(*args)` now if the caller runs in `loop`, else soon in `loop`; no-op if `loop` is closed."""
    if in_loop(loop):
        function(*args)
    elif not loop.is_closed():
        loop.call_soon_threadsafe(function, *args)


def cancel_task_threadsafe(task: "asyncio.Task[Any] | None") -> None:
    """Cancel `task` from any thread; no-op if it is None or done, or if its loop is closed."""
    if task is not None and not task.done():
        run_in_loop(task.get_loop(), task.cancel)
