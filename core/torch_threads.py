"""The number of threads with which torch computes."""

import contextlib
import ctypes
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread in the block: many small operations take longer if threads wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def limit_this_thread(num_threads: int) -> None:
    """Let parallel operations of the calling thread use up to `num_threads` threads, which end with it.

    `torch.set_num_threads` would start threads that stay. No-op if OpenMP's library cannot be found.
    """
    torch.get_num_threads()  # chooses the number that is replaced here
    # The sixth field of a line is a path, which may hold spaces.
    mapped = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    for path in mapped:
        if re.match(r"lib(gomp|omp|iomp5)\b", os.path.basename(path)):
            with contextlib.suppress(OSError):  # the file was replaced
                ctypes.CDLL(path).omp_set_num_threads(num_threads)
