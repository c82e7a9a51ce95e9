"""Memory of a file that the system maps in huge pages, of 2 MiB, where the system can.

Without them the first use of each 4 KiB takes a page fault, and the more of the file is in use, the longer the system
takes to end a process and to map the file in its successor. Most systems give shared memory huge pages on demand only.
"""

import ctypes
import logging
import mmap
import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vllm_mp.core.worker.memory.page_tables import map_pages

logger = logging.getLogger(__name__)

HUGE_PAGE_BYTES: Final = 2 * 2**20
_MADV_COLLAPSE: Final = 25
"""Of Linux 6.1."""
_MOST_S: Final = 0.002
"""Time that a step may spend. A huge page takes 0.1 ms, and in a virtual machine that never used the memory 5 ms."""
_MAP_FIXED: Final = 0x10
_FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_aligned(descriptor: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    """Map the first `num_bytes` of a file, shared, at a multiple of the size of a huge page; uint8 [num_bytes].

    They stay mapped as long as something refers to the array. Raises OSError if the system cannot.
    """
    reserved = _mmap(None, num_bytes + HUGE_PAGE_BYTES, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    address = -(-reserved // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    try:
        _mmap(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
    except OSError:
        _libc.munmap(reserved, num_bytes + HUGE_PAGE_BYTES)
        raise
    end, reserved_end = address + -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, reserved + num_bytes + HUGE_PAGE_BYTES
    for begin, stop in ((reserved, address), (end, reserved_end)):
        if begin < stop:
            _libc.munmap(begin, stop - begin)
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    # Not at the end of the process, in which other threads may still use the memory.
    weakref.finalize(memory, _libc.munmap, address, num_bytes).atexit = False
    return np.ctypeslib.as_array(memory)


def _mmap(address: int | None, num_bytes: int, protection: int, flags: int, descriptor: int) -> int:
    found: Any = _libc.mmap(address, num_bytes, protection, flags, descriptor, 0)
    if found == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return int(found)


class HugePages:
    """Has the blocks of a KV cache lie in huge pages before they are first used, so many at a time as fill one.

    So the memory grows with the use of the cache, as it does without. What is full of small pages stays so: to copy it
    would cost more than was saved.
    """

    def __init__(
        self,
        memory: npt.NDArray[np.uint8],
        segments: Sequence[tuple[int, int]],
        num_used: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`memory` is what `map_aligned` has returned. `segments`: (where the first block begins, bytes of a block) of
        each part of it. The first `num_used` blocks are used already. `clock` returns seconds.
        """
        self._address = memory.ctypes.data
        self._segments = segments
        self._clock = clock
        self._num_asked = num_used
        """Blocks for which pages were asked, or are in `_next`, or never will be."""
        self._step = max(1, HUGE_PAGE_BYTES // max(size for _, size in segments))
        self._left = np.ones(len(memory) // HUGE_PAGE_BYTES, np.bool_)
        """Which pages, whole ones of the memory, were not in `_next` yet."""
        self._next: list[int] = []
        """The pages to ask for next, from the last to the first."""

    def cover(self, num_blocks: int) -> None:
        """Have the first `num_blocks` blocks, and a few more, lie in huge pages, as far as the system gives any.

        A call takes about `_MOST_S`; the next one goes on.
        """
        if num_blocks <= self._num_asked and not self._next:
            return
        end = self._clock() + _MOST_S
        while self._next or self._num_asked < num_blocks:
            if self._num_asked < num_blocks:
                self._num_asked = max(self._num_asked, num_blocks - num_blocks % self._step)
                self._next = self._pages_of(self._num_asked, self._num_asked + self._step)
                self._num_asked += self._step
            elif not self._make(self._next.pop()):
                self._next.clear()
                self._left[:] = False
            elif self._clock() > end:
                break

    def _pages_of(self, begin: int, end: int) -> list[int]:
        """Return the pages with the blocks `begin` to `end` - 1 that were not returned before."""
        pages: list[int] = []
        for at, size in self._segments:
            first = (at + begin * size) // HUGE_PAGE_BYTES
            found = first + np.flatnonzero(self._left[first : -(-(at + end * size) // HUGE_PAGE_BYTES)])
            self._left[found] = False
            pages.extend(found.tolist())
        return pages[::-1]

    def _make(self, page: int) -> bool:
        """Make a huge page of whatever is there; return whether the system did."""
        address = self._address + page * HUGE_PAGE_BYTES
        map_pages(address, mmap.PAGESIZE)  # the system makes none of a stretch of which nothing is mapped
        if _libc.madvise(address, HUGE_PAGE_BYTES, _MADV_COLLAPSE):
            logger.info("the system gives the KV cache no more huge pages: %s", os.strerror(ctypes.get_errno()))
            return False
        return True
