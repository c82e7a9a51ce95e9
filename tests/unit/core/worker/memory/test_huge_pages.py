"""A KV cache in huge pages: what it holds stays, its memory grows with its use, and it does without them."""

import os

import numpy as np
import pytest

from vllm_mp.core.pages import mapping
from vllm_mp.core.pages.mapping import HUGE_PAGE_BYTES, map_aligned
from vllm_mp.core.worker.memory.huge_pages import HugePages

BLOCK_BYTES = HUGE_PAGE_BYTES // 4


class Memory:
    """Two segments of some blocks, a huge page for each four of them, after a page of other data."""

    def __init__(self, num_used=0, num_blocks=20):
        self.descriptor = os.memfd_create("test")
        size = HUGE_PAGE_BYTES + 2 * num_blocks * BLOCK_BYTES + 4096
        os.ftruncate(self.descriptor, size)
        self.bytes = map_aligned(self.descriptor, size)
        segments = [(HUGE_PAGE_BYTES, BLOCK_BYTES), (HUGE_PAGE_BYTES + num_blocks * BLOCK_BYTES, BLOCK_BYTES)]
        self.pages = HugePages(self.bytes, segments, num_blocks, num_used)

    def num_bytes(self):
        return 512 * os.fstat(self.descriptor).st_blocks

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self.descriptor)


@pytest.fixture
def asked(monkeypatch):
    """The pages that the system is asked for, by their number in the memory; it gives them."""
    pages = []
    monkeypatch.setattr(HugePages, "_make", lambda self, page: pages.append(page) or True)
    return pages


def test_pages_are_asked_for_a_stretch_ahead_of_the_blocks_in_use_and_little_by_little(asked):
    with Memory() as memory:
        counts = []
        for num_blocks in range(9):
            memory.pages.cover(num_blocks)
            counts.append(len(asked))
        memory.pages.cover(1)
        assert counts == [0, 1, 2, 3, 4, 5, 5, 6, 6]
        assert asked == [1, 6, 2, 7, 3, 8]
        memory.pages.cover(20)
        assert sorted(asked) == list(range(1, 11)), "all pages of the segments and no other"


def test_two_stretches_are_asked_for_ahead_of_the_blocks_in_use_while_nothing_else_is_to_do(asked):
    with Memory() as memory:
        while memory.pages.cover_ahead():
            pass
        assert asked == [1, 6, 2, 7]
        memory.pages.cover(4)
        assert asked == [1, 6, 2, 7]
        assert memory.pages.cover_ahead()
        assert asked == [1, 6, 2, 7, 3]
        while memory.pages.cover_ahead():
            pass
        assert asked == [1, 6, 2, 7, 3, 8]


def test_eighth_of_a_large_cache_is_asked_for_while_nothing_else_is_to_do(asked):
    with Memory(num_blocks=96) as memory:
        while memory.pages.cover_ahead():
            pass
        assert len(asked) == 2 * 96 // 8 // 4
        memory.pages.cover(4)
        while memory.pages.cover_ahead():
            pass
        assert len(asked) == 2 * (96 // 8 + 4) // 4


def test_core_asks_for_no_pages_ahead_before_it_uses_more_blocks_than_the_one_before(asked):
    with Memory(num_used=5) as memory:
        memory.pages.cover(5)
        assert not memory.pages.cover_ahead()
        memory.pages.cover(6)
        assert memory.pages.cover_ahead()


def test_pages_with_blocks_that_are_used_already_are_left_out(asked):
    with Memory(num_used=5) as memory:
        memory.pages.cover(5)
        assert asked == []
        memory.pages.cover(7)
        assert asked == [3, 8]


def test_page_of_two_segments_is_asked_for_once(asked):
    with Memory() as memory:
        half = HUGE_PAGE_BYTES // 2
        HugePages(memory.bytes, [(half, half), (5 * half, half)], 4, 0).cover(4)
        assert asked == [0, 1, 2, 3, 4]


def test_what_the_memory_holds_stays_and_it_grows_by_the_pages_that_are_used():
    with Memory() as memory:
        memory.bytes[HUGE_PAGE_BYTES : 2 * HUGE_PAGE_BYTES : 5000] = 3
        before = memory.num_bytes()
        memory.pages.cover(1)
        assert (memory.bytes[HUGE_PAGE_BYTES : 2 * HUGE_PAGE_BYTES : 5000] == 3).all()
        if memory.num_bytes() == before:
            pytest.skip("this system gives no huge pages")
        assert memory.num_bytes() == HUGE_PAGE_BYTES
        memory.pages.cover(4)
        assert memory.num_bytes() == 4 * HUGE_PAGE_BYTES
        assert np.count_nonzero(memory.bytes) == -(-HUGE_PAGE_BYTES // 5000)


def test_system_that_refuses_a_page_is_not_asked_again(monkeypatch):
    calls = []
    with Memory() as memory:
        monkeypatch.setattr(mapping._libc, "madvise", lambda *arguments: calls.append(arguments) or -1)
        memory.pages.cover(1)
        count = len(calls)
        memory.pages.cover(20)
        assert len(calls) == count > 0
        assert {address for address, *_ in calls} == {memory.bytes.ctypes.data + HUGE_PAGE_BYTES}
        memory.bytes[:] = 1
