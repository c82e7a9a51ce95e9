"""The mapped files of packed weights, whose pages become huge where the system keeps the file in small ones.

A decode reads all weights in each step. In pages of 4 KiB that takes up to a fifth longer, because the processor looks
up the address of each page. Linux keeps the files in huge pages itself if the file system can do that, which few can;
and not for long where memory is short.
"""

import ctypes
import errno
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from vllm_mp.core.pages.mapping import (
    HUGE_PAGE_BYTES,
    MappedBytes,
    make_huge,
    map_bytes,
    map_pages,
    move_pages,
    prefer_huge_pages,
)
from vllm_mp.kernels.cpu.packed import Arena
from vllm_mp.machine.loading_thread import BESIDE_A_CORE, lower_priority

logger = logging.getLogger(__name__)

_DELAY_S: Final = 2.0
"""Time from the start until pages are moved: the core first answers what waits for it."""
_PIECE_BYTES: Final = 8 * 2**20
"""Bytes that are copied between two steps, in 1 or 2 ms."""
_REST: Final = 4
"""How many times as long as a piece takes the thread rests after it."""
_ENOUGH: Final = 0.9
"""Share of the pages in use that are huge with which nothing is moved."""
_SWITCH: Final = "THP_MEM_ALLOC_ENABLE"
"""The environment variable of torch that lets large tensors lie in huge pages."""
_SMAPS: Final = Path("/proc/self/smaps")
_THP: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")

_mappings: "list[weakref.ref[MappedBytes]]" = []
"""The mapped files that no thread has looked at."""


def map_weights(descriptor: int, num_bytes: int) -> Tensor:
    """Map a file of weights, so that all cores share the memory until they write to it; uint8 [num_bytes].

    Raises OSError if the system cannot.
    """
    memory = map_bytes(descriptor, num_bytes, is_private=True)
    prefer_huge_pages(ctypes.addressof(memory), num_bytes)
    _mappings.append(weakref.ref(memory))
    return torch.from_numpy(np.ctypeslib.as_array(memory))


def map_pages_of_weights() -> None:
    """Have the system map the pages of all weights."""
    for reference in _mappings:
        if (memory := reference()) is not None:
            map_pages(ctypes.addressof(memory), len(memory))


def move_weights_later(alone: Callable[[], AbstractContextManager[bool]]) -> None:
    """Start a thread that copies weights that lie in small pages to huge pages, a piece at a time, if there is memory.

    Their addresses stay. `alone` returns a context in which no step is computed, and nothing else is done; its value is
    False if the core stops. The copies take memory in each core that makes them.
    """
    if _mappings:
        threading.Thread(target=_move_all, args=(alone,), name="weight-mover", daemon=True).start()


def _move_all(alone: Callable[[], AbstractContextManager[bool]]) -> None:
    lower_priority(threading.get_native_id(), BESIDE_A_CORE)
    time.sleep(_DELAY_S)
    while _mappings and _move(_mappings.pop(), alone):
        pass


def _move(reference: "weakref.ref[MappedBytes]", alone: Callable[[], AbstractContextManager[bool]]) -> bool:
    """Move a file, unless it is given up meanwhile; return whether others should be moved too."""
    num_bytes = _bytes_to_move(reference)
    if num_bytes == 0:
        return True
    if not Arena().has_room(num_bytes):
        logger.info("the weights stay in small pages, because there is little memory")
        return False
    fresh = map_bytes(None, _PIECE_BYTES, is_private=True)
    source = ctypes.addressof(fresh)
    prefer_huge_pages(source, _PIECE_BYTES)
    begin = time.monotonic()
    for at in range(0, num_bytes, _PIECE_BYTES):
        size = min(_PIECE_BYTES, num_bytes - at)
        started = time.monotonic()
        try:
            ctypes.memset(source, 1, size)  # which takes the system's memory before the steps wait
            _check_huge(source, size)
            with alone() as goes_on:
                memory = reference()
                if memory is None or not goes_on:
                    return goes_on
                ctypes.memmove(source, ctypes.addressof(memory) + at, size)
                move_pages(source, ctypes.addressof(memory) + at, size)
                del memory
        except OSError as error:
            logger.info("weights stay in small pages: %s", error)
            return False
        time.sleep(_REST * (time.monotonic() - started))
    logger.info("%.1f GiB of weights lie in huge pages, after %.1f s", num_bytes / 2**30, time.monotonic() - begin)
    return True


def _bytes_to_move(reference: "weakref.ref[MappedBytes]") -> int:
    """Return how many bytes of a file, from its begin on, must be moved; 0 if it lies in huge pages, or can in none."""
    memory = reference()
    if memory is None or os.environ.get(_SWITCH) == "0" or not _THP.exists() or "[never]" in _THP.read_text():
        return 0
    return 0 if _is_huge(ctypes.addressof(memory)) else len(memory) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES


def _check_huge(address: int, num_bytes: int) -> None:
    """Raise OSError if the memory there, which was to lie in huge pages, does not and cannot."""
    try:
        make_huge(address, num_bytes)
    except OSError as error:
        if error.errno != errno.EINVAL:  # before Linux 6.1, which does not tell
            raise


def _is_huge(address: int) -> bool:
    """Return whether the mapping that begins at `address` lies in huge pages, as far as it has been read.

    A step does not read all of a file: it has the embedding a second time, for example.
    """
    fields = re.search(rf"^{address:x}-.*?^VmFlags:", _SMAPS.read_text(), re.DOTALL | re.MULTILINE)
    if fields is None:
        return False
    kib = {name: int(value) for name, value in re.findall(r"^(\w+): +(\d+) kB$", fields[0], re.MULTILINE)}
    return kib["FilePmdMapped"] + kib["AnonHugePages"] > _ENOUGH * kib["Rss"]
