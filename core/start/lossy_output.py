"""Standard output and error that never fail."""

import contextlib
import io
import os
import sys
from typing import Any


class _LossyFile(io.FileIO):
    """Discards data that cannot be written."""

    def write(self, data: Any, /) -> int:
        with contextlib.suppress(OSError):
            return super().write(data)
        return len(data)


def make_output_lossy() -> None:
    """Make writes to standard output and error never fail, even if the disk is full or the reader has gone.

    Standard descriptors that are closed are opened on /dev/null. Otherwise the next opened file would get such a
    descriptor, and with it everything that is printed.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.BufferedWriter(_LossyFile(descriptor, "w", closefd=False)),
            errors="backslashreplace",
            line_buffering=True,
        )
        for descriptor in (1, 2)
    )
