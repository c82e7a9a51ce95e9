"""The number of threads with which torch computes."""

import contextlib
import ctypes
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch

_ALWAYS_ALONE = 2**15
"""Number of elements up to which torch uses one thread by itself."""
MAX_ELEMENTS_OF_ONE_THREAD = 2**20
"""Number of elements up to which an operation on them is quicker in one thread: it takes less than a millisecond, and
threads that other programs keep from their processors would be waited for much longer."""


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread in the block: many small operations take longer if threads wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def threads_for(num_elements: int) -> contextlib.AbstractContextManager[None]:
    """Limit torch to one thread in the block if its operations are on at most `MAX_ELEMENTS_OF_ONE_THREAD`."""
    is_small = _ALWAYS_ALONE < num_elements <= MAX_ELEMENTS_OF_ONE_THREAD
    return one_thread() if is_small else contextlib.nullcontext()


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
