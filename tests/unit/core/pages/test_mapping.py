"""Mapped memory: where it lies, how long it stays, and what replaces it."""

import ctypes
import gc
import os
from pathlib import Path

import pytest

from vllm_mp.core.pages.mapping import HUGE_PAGE_BYTES, map_aligned, map_bytes, move_pages

MAPS = Path("/proc/self/maps")


@pytest.fixture
def file():
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, HUGE_PAGE_BYTES + 4096)
    yield descriptor
    os.close(descriptor)


def test_map_lies_at_a_multiple_of_a_huge_page_and_goes_with_its_last_user(file):
    memory = map_aligned(file, HUGE_PAGE_BYTES + 4096)
    address = memory.ctypes.data
    assert address % HUGE_PAGE_BYTES == 0
    memory[5] = 7
    assert os.pread(file, 1, 5) == b"\x07"
    part = memory[:10]
    del memory
    gc.collect()
    assert part[5] == 7
    assert f"{address:x}-" in MAPS.read_text()
    del part
    gc.collect()
    assert f"{address:x}-" not in MAPS.read_text()


def test_map_of_no_file_is_an_error():
    with pytest.raises(OSError, match="Bad file descriptor"):
        map_aligned(-1, 4096)


def test_what_is_written_to_a_private_map_does_not_reach_the_file(file):
    memory = map_bytes(file, 4096, is_private=True)
    memory[0] = 1
    assert os.pread(file, 1, 0) == b"\0"


def test_moved_pages_replace_those_of_the_file_and_leave_zeros(file):
    os.pwrite(file, b"abc", 0)
    os.pwrite(file, b"def", HUGE_PAGE_BYTES)
    memory, fresh = map_bytes(file, HUGE_PAGE_BYTES + 4096, is_private=True), map_bytes(None, 8192, is_private=True)
    ctypes.memset(fresh, ord("x"), 8192)
    move_pages(ctypes.addressof(fresh), ctypes.addressof(memory), 4096)
    assert bytes(memory[:3]) == b"xxx"
    assert bytes(memory[HUGE_PAGE_BYTES:][:3]) == b"def"
    assert bytes(fresh[4094:4098]) == b"\0\0xx"
    assert os.pread(file, 3, 0) == b"abc"
