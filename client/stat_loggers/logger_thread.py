"""The thread that calls one stat logger, which may block or fail."""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)


class _Call(NamedTuple):
    name: str
    method: Callable[..., None]
    args: tuple[Any, ...]
    done: "Future[None]"


class LoggerThread:
    """Calls the methods of a logger, one after another; the thread starts with the first call.

    The first call that raises is reported, and is the last. A call that does not return holds up nothing but the calls
    after it, until `drop_if_blocked`. The thread is a daemon: it does not keep the interpreter from its exit.
    """

    def __init__(self, name: str, on_failure: Callable[["LoggerThread"], None]) -> None:
        """`on_failure` is called in the thread when a call has raised."""
        self.name = name
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._calls: deque[_Call] = deque()
        self._current: _Call | None = None
        self._current_since = 0.0
        self._thread: threading.Thread | None = None
        self._is_closed = False
        """There are no further calls."""
        self._is_reported = False

    def call(self, name: str, method: Callable[..., None], *args: Any) -> "Future[None]":
        """Call `method(*args)`, a method called `name`, after the calls before it.

        The future ends when the call has ended, or when it is certain that there will be none.
        """
        call = _Call(name, method, args, Future())
        with self._changed:
            if self._is_closed:
                call.done.set_result(None)
                return call.done
            self._calls.append(call)
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"stat-logger-{self.name}", daemon=True)
                self._thread.start()
        return call.done

    @property
    def has_calls(self) -> bool:
        """A call has not ended."""
        return self._current is not None or bool(self._calls)

    def drop_if_blocked(self, limit_s: float) -> bool:
        """End this thread if its current call takes longer than `limit_s`, and report that; return whether it did."""
        with self._changed:
            current, seconds = self._current, time.monotonic() - self._current_since
            if current is None or self._is_reported or seconds < limit_s:
                return False
            self._is_reported = self._is_closed = True
        logger.error(
            "stat logger %r has blocked for %.1f s in %s, and is not called again: the limit is %g s",
            *(self.name, seconds, current.name, limit_s),
        )
        self._forget()
        _settle(current.done)
        return True

    def close(self) -> None:
        """Take no more calls; those that wait are still made."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def join(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for the end of the thread after `close`."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _run(self) -> None:
        while (call := self._next()) is not None:
            try:
                call.method(*call.args)
            except BaseException:  # also SystemExit, which would end the thread unseen
                with self._changed:
                    is_reported, self._is_reported, self._is_closed = self._is_reported, True, True
                if not is_reported:
                    logger.exception("stat logger %r failed in %s, and is not called again", self.name, call.name)
                    self._on_failure(self)
                self._forget()
            _settle(call.done)

    def _next(self) -> _Call | None:
        with self._changed:
            self._current = None
            while not self._calls and not self._is_closed:
                self._changed.wait()
            if not self._calls:
                return None
            self._current, self._current_since = self._calls.popleft(), time.monotonic()
            return self._current

    def _forget(self) -> None:
        """Drop the calls that wait, after which none is added."""
        with self._changed:
            waiting, self._calls = self._calls, deque()
        for call in waiting:
            _settle(call.done)


def _settle(done: "Future[None]") -> None:
    with contextlib.suppress(InvalidStateError):  # it was settled, or cancelled by the caller that waited for it
        done.set_result(None)
