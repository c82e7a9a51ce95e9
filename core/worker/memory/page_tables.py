"""The page tables of a process: which pages of shared memory it can read without a page fault.

A fork has none for files that its parent has mapped. Its first step would take a page fault for every 64 KiB of the
weights and of the KV cache.
"""

import ctypes
from pathlib import Path
from typing import Final

from vllm_mp.model_store.packed_names import PACKED_SUFFIX

_MADV_POPULATE_READ: Final = 22
"""Of Linux 5.14. Pages of a shared file that were mapped so can be written too, and mapping them takes half as long as
with MADV_POPULATE_WRITE."""
_PIECE_BYTES: Final = 32 * 2**20
"""Bytes that are mapped in one call, of about 2 ms. Other threads that map or allocate memory wait for its end."""
_MAPPINGS: Final = Path("/proc/self/maps")


def map_pages(address: int, num_bytes: int) -> None:
    """Have the system map the pages of a file that is mapped at `address`; no-op if it cannot.

    Other Python threads run meanwhile.
    """
    madvise = ctypes.CDLL(None).madvise
    for offset in range(0, num_bytes, _PIECE_BYTES):
        size = min(_PIECE_BYTES, num_bytes - offset)
        madvise(ctypes.c_void_p(address + offset), ctypes.c_size_t(size), _MADV_POPULATE_READ)


def map_packed_weights() -> None:
    """Have the system map the pages of all files of packed weights that this process has mapped."""
    for line in _MAPPINGS.read_text().splitlines():
        addresses, *_, path = line.split(maxsplit=5)
        if path.removesuffix(" (deleted)").endswith(PACKED_SUFFIX):
            begin, end = (int(each, 16) for each in addresses.split("-"))
            map_pages(begin, end - begin)
