"""Memory that is mapped at whole huge pages (2 MiB), and what the system is asked to do with it."""

import ctypes
import mmap
import os
import weakref
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

HUGE_PAGE_BYTES: Final = 2 * 2**20
_MADV_POPULATE_READ: Final = 22
"""Of Linux 5.14. Pages of a shared file that were mapped so can be written too, and mapping them takes half as long as
with MADV_POPULATE_WRITE."""
_MADV_HUGEPAGE: Final = 14
_MADV_COLLAPSE: Final = 25
"""Of Linux 6.1."""
_MAP_FIXED: Final = 0x10
_MREMAP_FLAGS: Final = 0x1 | 0x2 | 0x4
"""The pages move to the given address. Their old addresses stay mapped (Linux 5.7), so that nothing else gets these."""
_PIECE_BYTES: Final = 32 * 2**20
"""Bytes that are mapped in one call, of about 2 ms. Other threads that map or allocate memory wait for its end."""
_FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

MappedBytes: TypeAlias = "ctypes.Array[ctypes.c_uint8]"
"""Bytes that stay mapped as long as something refers to them."""


def map_bytes(descriptor: int | None, num_bytes: int, *, is_private: bool = False) -> MappedBytes:
    """Map the first `num_bytes` of a file at a multiple of the size of a huge page; None: of memory with zeros.

    What is written goes to the file, or with `is_private` to memory of this process. Raises OSError if the system
    cannot.
    """
    size = num_bytes + HUGE_PAGE_BYTES
    reserved = _mmap(None, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    address = -(-reserved // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    flags = _MAP_FIXED | (mmap.MAP_PRIVATE if is_private else mmap.MAP_SHARED)
    if descriptor is None:
        descriptor, flags = -1, flags | mmap.MAP_ANONYMOUS
    try:
        _mmap(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor)
    except OSError:
        _libc.munmap(reserved, size)
        raise
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    # Not at the end of the process, in which other threads may still use the memory.
    weakref.finalize(memory, _libc.munmap, reserved, size).atexit = False
    return memory


def map_aligned(descriptor: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    """Do what `map_bytes` does with a file, and return an array, uint8 [num_bytes], which refers to the bytes."""
    return np.ctypeslib.as_array(map_bytes(descriptor, num_bytes))


def map_pages(address: int, num_bytes: int) -> None:
    """Have the system map the pages of a file that is mapped at `address`; no-op if it cannot.

    Other Python threads run meanwhile.
    """
    for offset in range(0, num_bytes, _PIECE_BYTES):
        _libc.madvise(address + offset, min(_PIECE_BYTES, num_bytes - offset), _MADV_POPULATE_READ)


def prefer_huge_pages(address: int, num_bytes: int) -> None:
    """Have the system use huge pages there from now on, where it can."""
    _libc.madvise(address, num_bytes, _MADV_HUGEPAGE)


def make_huge(address: int, num_bytes: int) -> None:
    """Make huge pages of whatever is there. Raises OSError if the system does not, EINVAL if it cannot at all."""
    if _libc.madvise(address, num_bytes, _MADV_COLLAPSE):
        raise _latest_error()


def move_pages(source: int, target: int, num_bytes: int) -> None:
    """Replace what is mapped at `target` by the memory at `source`, of no file, where zeros are left.

    Both are multiples of the size of a page. Raises OSError if the system cannot.
    """
    if _libc.mremap(source, num_bytes, num_bytes, _MREMAP_FLAGS, target) == _FAILED:
        raise _latest_error()


def _mmap(address: int | None, num_bytes: int, protection: int, flags: int, descriptor: int) -> int:
    found: Any = _libc.mmap(address, num_bytes, protection, flags, descriptor, 0)
    if found == _FAILED:
        raise _latest_error()
    return int(found)


def _latest_error() -> OSError:
    error = ctypes.get_errno()
    return OSError(error, os.strerror(error))
