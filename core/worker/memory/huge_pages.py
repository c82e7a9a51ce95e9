"""Memory of a file that the system maps in huge pages, of 2 MiB, where the system can.

Without them the first use of each 4 KiB takes a page fault, and the more of the file is in use, the longer the system
takes to end a process and to map the file in its successor. Most systems give shared memory huge pages on demand only.
"""

import ctypes
import logging
import math
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vllm_mp.core.worker.memory.page_tables import map_pages

logger = logging.getLogger(__name__)

HUGE_PAGE_BYTES: Final = 2 * 2**20
_MADV_COLLAPSE: Final = 25
"""Of Linux 6.1."""
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
    size = num_bytes + HUGE_PAGE_BYTES
    reserved = _mmap(None, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    address = -(-reserved // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    try:
        _mmap(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
    except OSError:
        _libc.munmap(reserved, size)
        raise
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    # Not at the end of the process, in which other threads may still use the memory.
    weakref.finalize(memory, _libc.munmap, reserved, size).atexit = False
    return np.ctypeslib.as_array(memory)


def _mmap(address: int | None, num_bytes: int, protection: int, flags: int, descriptor: int) -> int:
    found: Any = _libc.mmap(address, num_bytes, protection, flags, descriptor, 0)
    if found == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return int(found)


class HugePages:
    """Has the blocks of a KV cache lie in huge pages before they are used.

    The pages are asked for in stretches, each of as many blocks as fill a page, one stretch ahead of the blocks in use,
    and a few at a time. So the memory grows with the use of the cache, as it does without, and no step waits for long:
    a page takes 0.1 ms, and 5 ms in a virtual machine that has not used the memory before.
    """

    def __init__(
        self, memory: npt.NDArray[np.uint8], segments: Sequence[tuple[int, int]], num_blocks: int, num_used: int
    ) -> None:
        """`memory` is what `map_aligned` has returned. `segments`: (where the first block begins, bytes of a block) of
        each part of it, with `num_blocks` blocks each. The first `num_used` of them are used already.
        """
        self._address = memory.ctypes.data
        self._stretch = max(1, HUGE_PAGE_BYTES // max(size for _, size in segments))
        self._begin = self._num_used = num_used
        self._num_covered = 0.0
        """Number of blocks from `_begin` on whose pages were asked for, a part for each page."""
        self._pages = self._all_pages(len(memory) // HUGE_PAGE_BYTES, segments, num_blocks)

    def cover(self, num_blocks: int) -> None:
        """Ask for pages, because the first `num_blocks` blocks are used from now on."""
        if num_blocks <= self._num_used:
            return
        self._num_used = num_blocks
        count = num_blocks - self._begin
        while self._num_covered < min(2 * count, count + self._stretch):
            page, num_covered = next(self._pages, (None, math.inf))
            self._num_covered += num_covered
            if page is not None and not self._make(page):
                self._num_covered = math.inf

    def _all_pages(
        self, num_pages: int, segments: Sequence[tuple[int, int]], num_blocks: int
    ) -> Iterator[tuple[int, float]]:
        """Yield the pages, and the number of blocks that each stands for; those with blocks in use are left out."""
        is_left = np.ones(num_pages, np.bool_)
        for begin in range(-(-self._begin // self._stretch) * self._stretch, num_blocks, self._stretch):
            pages: list[int] = []
            for at, size in segments:
                first = (at + begin * size) // HUGE_PAGE_BYTES
                end = -(-(at + (begin + self._stretch) * size) // HUGE_PAGE_BYTES)
                found = first + np.flatnonzero(is_left[first:end])
                is_left[found] = False
                pages.extend(found.tolist())
            for page in pages:
                yield page, self._stretch / len(pages)

    def _make(self, page: int) -> bool:
        """Make a huge page of whatever is there; return whether the system did."""
        address = self._address + page * HUGE_PAGE_BYTES
        map_pages(address, mmap.PAGESIZE)  # the system makes none where nothing is mapped
        if _libc.madvise(address, HUGE_PAGE_BYTES, _MADV_COLLAPSE):
            logger.info("the system gives the KV cache no more huge pages: %s", os.strerror(ctypes.get_errno()))
            return False
        return True
