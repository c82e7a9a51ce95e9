"""The launch lines of a core, which its parent writes to the core's standard input."""

import os
import select
from collections.abc import Callable
from typing import Final

import msgspec

from vllm_mp.core.stop_signal import StopSignal
from vllm_mp.core_link.core_launch import CoreLaunch

_LOOK_S: Final = 1.0
"""Time between two calls of `meanwhile`."""
_unread = bytearray()
"""What has been read of standard input beyond a launch line."""


def read_launch_line(stop: StopSignal | None = None, meanwhile: Callable[[], None] = lambda: None) -> CoreLaunch:
    """Read a launch line from standard input, which stays open: its end means that the parent has died.

    With `stop` calls `meanwhile` every `_LOOK_S`, and raises `StopSignal.Stopped` once `stop` is set, or if standard
    input ends. Without raises SystemExit if standard input ends before the line does.
    """
    while b"\n" not in _unread:
        if stop is not None:
            while not select.select([0, stop.fd], [], [], _LOOK_S)[0]:
                meanwhile()
            stop.raise_if_set()
        is_open = read_more()
        if not is_open and stop is not None:
            raise StopSignal.Stopped
        if not is_open:
            raise SystemExit(
                "standard input has no launch line: python -m vllm_mp.core is for engines to start; use "
                "`vllm-mp engine` to start a core by hand"
            )
    line, _, rest = bytes(_unread).partition(b"\n")
    _unread[:] = rest
    return msgspec.json.decode(line, type=CoreLaunch)


def read_more() -> bool:
    """Read from standard input, which has something to read; return False at its end."""
    chunk = os.read(0, 65_536)
    _unread.extend(chunk)
    return bool(chunk)


def has_launch_line() -> bool:
    """Return whether a whole launch line has been read that `read_launch_line` has not returned."""
    return b"\n" in _unread


def forget_unread() -> None:
    """Forget what has been read: a process that was forked has another standard input."""
    _unread.clear()
