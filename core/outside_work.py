"""What the core does outside of steps for requests and calls: on the status page, and alone if it tests a suspect.

Threads compile constraints and load adapters while steps go on. If the core dies of that, the page must name the
requests for which it was done, and no step may be under way while the work of a suspect is tested.
"""

import collections
import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from vllm_mp.core_link.core_status import OutsideTask
from vllm_mp.core_link.status_page import StatusPage

_DRAIN_S = 10.0
"""Time for which work that must be alone waits for other work to end, which may never happen."""
_BEAT_S = 0.25
_MAX_BEATING_S = 60.0
"""Time for which the core beats while it waits; then it counts as hung."""


class OutsideWork:
    """Owns the list of what threads and calls do outside of steps, and publishes it.

    Work that must be alone begins when the core's loop has processed all pending steps and calls `run_alone`. `fd` is
    readable when there is such work.
    """

    def __init__(self, page: StatusPage | None = None) -> None:
        """Without a `page` nothing is published."""
        self._page = page
        self._changed = threading.Condition()
        self._tasks: dict[int, Sequence[OutsideTask]] = {}
        self._numbers = itertools.count()
        self._num_shared = 0
        """Number of pieces of work that run in threads and need not be alone."""
        self._waiting: collections.deque[object] = collections.deque()
        """The work that waits until it may run alone."""
        self._exclusive: object | None = None
        """The work that runs alone."""
        self._suspect_calls: set[int] = set()
        self._is_closed = False
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    @property
    def is_wanted(self) -> bool:
        """Whether work waits until it may run alone."""
        return bool(self._waiting)

    @property
    def has_suspect_calls(self) -> bool:
        """Whether a call is carried out that may have ended a core before."""
        return bool(self._suspect_calls)

    def begin(self, tasks: Sequence[OutsideTask], is_suspect_call: bool = False) -> int:
        """Publish `tasks` until `end` is called with the number that this returns."""
        with self._changed:
            number = next(self._numbers)
            if is_suspect_call:
                self._suspect_calls.add(number)
            self._set(number, tasks)
            return number

    def end(self, number: int) -> None:
        """Publish what `begin` was called with no longer."""
        with self._changed:
            self._suspect_calls.discard(number)
            self._remove(number)

    @contextlib.contextmanager
    def of(self, tasks: Sequence[OutsideTask], alone: bool = False) -> Iterator[None]:
        """Publish `tasks` in this block, which runs in a thread. With `alone`, wait until nothing else is under way."""
        work = object()
        with self._changed:
            if alone:
                self._waiting.append(work)
                os.eventfd_write(self.fd, 1)
                self._changed.wait_for(lambda: self._exclusive is work or self._is_closed)
            else:
                self._changed.wait_for(lambda: (self._exclusive is None and not self._waiting) or self._is_closed)
                self._num_shared += 1
            number = next(self._numbers)
            self._set(number, tasks)
        try:
            yield
        finally:
            with self._changed:
                self._remove(number)
                if not alone:
                    self._num_shared -= 1
                elif self._exclusive is work:
                    self._exclusive = None
                self._changed.notify_all()

    @contextlib.contextmanager
    def between_steps(self) -> Iterator[bool]:
        """Let nothing else be under way in this block, which runs in a thread; False if the core stops instead."""
        with self.of((), alone=True):
            yield not self._is_closed

    def run_alone(self, beat: Callable[[], object]) -> None:
        """Let the work run that waits until it may run alone, and wait for its end; no step may be pending.

        `beat` is called meanwhile, again and again. Call this in the core's thread.
        """
        while self._read_wish():
            with self.exclusively(beat), self._changed:
                self._exclusive = self._waiting.popleft()
                self._changed.notify_all()
                self._wait(lambda: self._exclusive is None, _MAX_BEATING_S, beat, lasting=True)

    @contextlib.contextmanager
    def exclusively(self, beat: Callable[[], object]) -> Iterator[None]:
        """Let no work of threads go on in this block; `beat` is as for `run_alone`. Call this in the core's thread."""
        mark = object()
        with self._changed:
            self._exclusive = mark
            self._wait(lambda: not self._num_shared, _DRAIN_S, beat)
        try:
            yield
        finally:
            with self._changed:
                self._exclusive = None
                self._changed.notify_all()

    def close(self) -> None:
        """Let nothing wait any more, and close `fd`."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _read_wish(self) -> bool:
        """Return whether work waits until it may run alone; `fd` is then readable for later work only."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        return bool(self._waiting)

    def _wait(
        self, condition: Callable[[], bool], limit_s: float, beat: Callable[[], object], lasting: bool = False
    ) -> None:
        """Wait for `condition`, at most for `limit_s` seconds; if it is `lasting`, go on waiting without beats."""
        end = time.monotonic() + limit_s
        while not self._changed.wait_for(condition, _BEAT_S) and not self._is_closed:
            if time.monotonic() < end:
                beat()
            elif not lasting:
                return

    def _set(self, number: int, tasks: Sequence[OutsideTask]) -> None:
        if tasks:
            self._tasks[number] = tasks
            self._publish()

    def _remove(self, number: int) -> None:
        if self._tasks.pop(number, None):
            self._publish()

    def _publish(self) -> None:
        if self._page is not None:
            self._page.note_outside([task for tasks in self._tasks.values() for task in tasks])
