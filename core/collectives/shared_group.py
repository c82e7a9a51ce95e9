"""The group of ranks on CPUs: sums through memory that all of them map.

Each rank has a counter and two slots. In a round it writes its part into one slot, raises its counter, and waits until
all counters have reached the round; then it reads all slots. The next round uses the other slot. A rank that begins the
round after that has seen all ranks arrive at the next one, so none of them still reads the slot that it overwrites.

A counter must become visible after the data before it, which x86-64 guarantees for plain stores and loads.
"""

import ctypes
import mmap
import platform
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from vllm_mp.core.collectives import futex
from vllm_mp.core.collectives.group import RankGroup, minimum_of

SLOT_BYTES: Final = 2**20
"""Bytes that a rank passes in one round; larger tensors take several rounds."""
_LINE: Final = 64
"""Bytes of a cache line: counters do not share one."""
_SPINS: Final = 300
"""Looks at a counter before the rank blocks, about 30 microseconds: the usual difference between ranks in a layer."""
_CHECK_S: Final = 0.1
_WORDS: Final = 2**32
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)


def is_available() -> bool:
    """Return whether this machine orders its stores as this group needs, and can wait for a word."""
    return platform.machine() == "x86_64" and futex.is_available()


def num_bytes(size: int) -> int:
    """Return the bytes of shared memory that a group of `size` ranks needs."""
    return _header_bytes(size) + 2 * size * SLOT_BYTES


def rounds(memory: mmap.mmap, offset: int, size: int) -> list[int]:
    """Return the number of rounds, modulo 2 ** 32, that each rank of the group at `offset` has begun."""
    return [int.from_bytes(memory[at : at + 4], "little") for at in range(offset, offset + size * _LINE, _LINE)]


def _header_bytes(size: int) -> int:
    return -(-size * _LINE // mmap.PAGESIZE) * mmap.PAGESIZE


class SharedMemoryGroup(RankGroup):
    """The ranks that map the same memory; an operation with small tensors takes about 20 microseconds."""

    def __init__(
        self,
        memory: mmap.mmap,
        offset: int,
        rank: int,
        size: int,
        check: Callable[[], None] = lambda: None,
        spins: bool = True,
    ) -> None:
        """Join the group whose `num_bytes(size)` bytes of `memory`, initially zero, begin at `offset`.

        `spins`: each rank has CPUs of its own, so that a rank looks for the others for a moment before it sleeps.
        `check` is called now and then while this rank waits; what it raises ends the operation,
        after which the group cannot be used.
        """
        self.rank = rank
        self.size = size
        self._check = check
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory, offset))
        self._counters = [futex.Word(base + other * _LINE) for other in range(size)]
        self._own = self._counters[rank]
        self._others = [counter for other, counter in enumerate(self._counters) if other != rank]
        self._round = self._own.value
        data = torch.frombuffer(memory, dtype=torch.uint8, offset=offset, count=num_bytes(size))
        slots = data[_header_bytes(size) :].view(2, size, SLOT_BYTES)
        self._slots = {dtype: slots.view(dtype) for dtype in _DTYPES}
        """[2, size, n] by dtype: the slots of even and of odd rounds, by rank."""
        self._spins = _SPINS if spins else 0

    def sum(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        step = SLOT_BYTES // x.itemsize
        if flat.numel() <= step:
            return self._exchange(flat).sum(0, dtype=x.dtype).view(x.shape)
        out = torch.empty_like(flat)
        for first in range(0, flat.numel(), step):
            out[first : first + step] = self._exchange(flat[first : first + step]).sum(0, dtype=x.dtype)
        return out.view(x.shape)

    def gather(self, x: Tensor) -> list[Tensor]:
        flat = x.reshape(-1)
        step = SLOT_BYTES // x.itemsize
        parts = [torch.empty_like(flat) for _ in range(self.size)] if self.rank == 0 else []
        for first in range(0, flat.numel(), step):
            exchanged = self._exchange(flat[first : first + step])
            for part, of_rank in zip(parts, exchanged, strict=False):
                part[first : first + step] = of_rank
        return [part.view(x.shape) for part in parts]

    def broadcast(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        step = SLOT_BYTES // x.itemsize
        out = torch.empty_like(flat)
        for first in range(0, flat.numel(), step):
            piece = flat[first : first + step]
            out[first : first + step] = self._exchange(piece, writes=self.rank == 0)[0]
        return out.view(x.shape)

    def minimum(self, value: int) -> int:
        return minimum_of(self, value, torch.device("cpu"))

    def _exchange(self, piece: Tensor, writes: bool = True) -> Tensor:
        """Write `piece` [n] into the slot of this rank; return the slots of all ranks, [size, n], valid until the
        next but one round."""
        of_round = self._slots[piece.dtype][self._round & 1, :, : len(piece)]
        if writes:
            of_round[self.rank].copy_(piece)
        self._round = (self._round + 1) % _WORDS
        self._own.set(self._round)
        for counter in self._others:
            self._wait(counter)
        return of_round

    def _wait(self, counter: futex.Word) -> None:
        """Wait until `counter` has reached the round."""
        target = self._round
        # The other rank is in this round, or in the next.
        for _ in range(self._spins):
            if (counter.value - target) % _WORDS <= 1:
                return
        while True:
            seen = counter.value
            if (seen - target) % _WORDS <= 1:
                return
            counter.wait_for_change(seen, _CHECK_S)
            if counter.value == seen:
                self._check()
