"""Memory of a file that the system maps in huge pages, of 2 MiB, where the system can.

Without them the first use of each 4 KiB takes a page fault, and the more of the file is in use, the longer the system
takes to end a process and to map the file in its successor. Most systems give shared memory huge pages on demand only.
"""

import logging
import math
import mmap
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from vllm_mp.core.pages.mapping import HUGE_PAGE_BYTES, make_huge, map_pages

logger = logging.getLogger(__name__)


class HugePages:
    """Has the blocks of a KV cache lie in huge pages before they are used.

    The pages are asked for in stretches, each of as many blocks as fill a page, one stretch ahead of the blocks in use,
    and a few at a time; while the engine has nothing else to do, two stretches ahead, or an eighth of the cache if that
    is more. So the memory grows with the use of the cache, as it does without, and no step waits for long: a page takes
    0.1 ms, and 5 ms in a virtual machine that has not used the memory before.
    """

    def __init__(
        self, memory: npt.NDArray[np.uint8], segments: Sequence[tuple[int, int]], num_blocks: int, num_used: int
    ) -> None:
        """`memory` is what `map_aligned` has returned. `segments`: (where the first block begins, bytes of a block) of
        each part of it, with `num_blocks` blocks each. The first `num_used` of them are used already.
        """
        self._address = memory.ctypes.data
        self._stretch = max(1, HUGE_PAGE_BYTES // max(size for _, size in segments))
        self._num_ahead = max(2 * self._stretch, num_blocks // 8)
        """Number of blocks that `cover_ahead` keeps ready."""
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
            self._cover_more()

    def cover_ahead(self) -> bool:
        """Ask for a page ahead of the blocks in use; return whether there is more to ask for.

        A core that has not come beyond the blocks of the one before asks for none: these may be ahead already.
        """
        if 0 < self._begin == self._num_used or self._num_covered >= self._num_used - self._begin + self._num_ahead:
            return False
        self._cover_more()
        return True

    def _cover_more(self) -> None:
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
        try:
            make_huge(address, HUGE_PAGE_BYTES)
        except OSError as error:
            logger.info("the system gives the KV cache no more huge pages: %s", error)
            return False
        return True
