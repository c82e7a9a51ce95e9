"""A line on the terminal that says what a command waits for."""

import sys
import threading
import time
from types import TracebackType
from typing import Self

from vllm_mp.machine.terminal_width import shortened, terminal_columns

_FIRST_S = 0.3
"""Waits that are shorter are not shown."""
_INTERVAL_S = 0.1


class WaitingLine:
    """A block that shows `text` and its seconds on standard error while it runs, if that is a terminal."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True) if sys.stderr.isatty() else None

    def __enter__(self) -> Self:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ends.set()
        if self._thread is not None:
            self._thread.join()

    def _show(self) -> None:
        started = time.monotonic()
        if self._ends.wait(_FIRST_S):
            return
        while not self._ends.wait(_INTERVAL_S):
            # Text that another thread writes begins after the line is cleared. A line that wraps could not be cleared.
            seconds = f" … {time.monotonic() - started:.1f} s"
            text = shortened(self._text, terminal_columns(sys.stderr) - len(seconds))
            sys.stderr.write(f"\r\x1b[K{text}{seconds}")
            sys.stderr.flush()
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
