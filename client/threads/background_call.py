"""A blocking call beside the event loop, in a daemon thread."""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def call_in_thread(call: Callable[[], Result]) -> "asyncio.Future[Result]":
    """Run `call` in a thread of its own, and return a future of what it returns or raises.

    Cancelling the future does not end the call. The thread is a daemon: it does not delay the end of the process.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            result = call()
        except BaseException as error:
            outcome: tuple[Result | None, BaseException | None] = (None, error)
        else:
            outcome = (result, None)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name=f"call-{getattr(call, '__name__', 'call')}", daemon=True).start()
    return future
