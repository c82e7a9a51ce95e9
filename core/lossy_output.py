"""Standard output and error whose writes never fail."""

import contextlib
import io
import os
import sys
from typing import Any


class _LossyFile(io.FileIO):
    """Drops what cannot be written."""

    def write(self, data: Any, /) -> int:
        with contextlib.suppress(OSError):
            return super().write(data)
        return len(data)


def make_output_lossy() -> None:
    """Let nobody who prints, warns or logs fail because the disk is full or the reader has gone.

    Descriptors that are closed are opened on nothing, or the next file that anyone opens would take what is printed.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.BufferedWriter(_LossyFile(descriptor, "w", closefd=False)),
            errors="backslashreplace",
            line_buffering=True,
        )
        for descriptor in (1, 2)
    )
