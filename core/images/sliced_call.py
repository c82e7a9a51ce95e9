"""A call that computes in slices: a thread of its own goes on only while the caller waits for it."""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class _Stopped(BaseException):
    """Raised at a pause point to end a call that nothing waits for any more."""


class SlicedCall(Generic[_T]):
    """Runs a function that stops at its pause points, so that its caller can do other things in between.

    Its thread and the caller's never run at the same time. The thread ends with the function, and the threads of its
    parallel operations end with it.
    """

    def __init__(
        self, function: Callable[[Callable[[], None]], _T], name: str, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`function` takes what it must call at its pause points. `name` is that of the thread; `clock` in seconds."""
        self._function = function
        self._name = name
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._goes_on = threading.Semaphore(0)
        self._has_stopped = threading.Semaphore(0)
        self._deadline = 0.0
        self._is_stopping = False
        self._result: list[_T] = []
        self._error: BaseException | None = None

    def advance(self, seconds: float) -> list[_T]:
        """Go on until the first pause point after `seconds`; return [result] at the end of the function, else [].

        Raises what the function raises. Must not be called after the end or after `stop`.
        """
        self._deadline = self._clock() + seconds
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        else:
            self._goes_on.release()
        self._has_stopped.acquire()
        if self._error is not None or self._result:
            self._thread.join()
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # its frames refer to what the function has computed, and to this object
        return self._result

    def stop(self) -> None:
        """End the call at its pause point and free what it has computed; no-op if it has ended."""
        if self._thread is not None and self._thread.is_alive():
            self._is_stopping = True
            self._goes_on.release()
            self._thread.join()

    def _run(self) -> None:
        try:
            self._result.append(self._function(self._pause))
        except _Stopped:
            pass
        except BaseException as error:  # raised again in the thread of the caller
            self._error = error
        self._has_stopped.release()

    def _pause(self) -> None:
        if self._clock() < self._deadline:
            return
        self._has_stopped.release()
        self._goes_on.acquire()
        if self._is_stopping:
            raise _Stopped
