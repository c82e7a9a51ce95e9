"""A queue of tensors from one rank to another, through memory that both map.

The writer raises the number of written tensors after it has filled a slot, the reader the number of taken tensors after
it has copied one. As in `shared_group`, a number must become visible after the data before it, which x86-64 guarantees.
"""

import ctypes
import math
import mmap
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from vllm_mp.core.collectives import futex

_LINE: Final = 64
_SPINS: Final = 300
"""Looks at a number before the rank sleeps, about 30 microseconds."""
_CHECK_S: Final = 0.1
_WORDS: Final = 2**32


class TensorQueue:
    """The queue as its only writer and its only reader see it."""

    def __init__(
        self,
        memory: mmap.mmap,
        offset: int,
        num_slots: int,
        slot_bytes: int,
        check: Callable[[], None] = lambda: None,
        spins: bool = True,
    ) -> None:
        """Use the `num_bytes` of `memory` from `offset` on, a multiple of the page size; they are initially zero.

        `num_slots` is a power of 2, so that the slots stay in their order when the numbers overflow. `check` is called
        now and then while this rank waits; what it raises ends the wait. `spins`: the rank has CPUs of its own, and
        looks at the other's number for a moment before it sleeps.
        """
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory, offset))
        self._written, self._taken = futex.Word(base), futex.Word(base + _LINE)
        slots = torch.frombuffer(memory, dtype=torch.uint8, offset=offset, count=self.num_bytes(num_slots, slot_bytes))
        self._slots = slots[mmap.PAGESIZE :].view(num_slots, -1)
        self._num_slots = num_slots
        self._check = check
        self._spins = _SPINS if spins else 0

    @staticmethod
    def num_bytes(num_slots: int, slot_bytes: int) -> int:
        """Return the bytes of shared memory that a queue needs; slots that no tensor has reached take no memory."""
        return mmap.PAGESIZE * (1 + num_slots * -(-slot_bytes // mmap.PAGESIZE))

    @staticmethod
    def written(memory: mmap.mmap, offset: int) -> int:
        """Return the number of tensors, modulo 2 ** 32, that were written to the queue at `offset`."""
        return int.from_bytes(memory[offset : offset + 4], "little")

    def put(self, x: Tensor) -> None:
        """Append a copy of `x`; wait while all slots are full."""
        number = self._written.value
        self._wait(self._taken, lambda taken: (number - taken) % _WORDS < self._num_slots)
        self._slot(number, x.nbytes, x.dtype).copy_(x.reshape(-1))
        self._written.set((number + 1) % _WORDS)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Wait for the next tensor, which has this shape and dtype, and return a copy of it."""
        number = self._taken.value
        self._wait(self._written, lambda written: written != number)
        x = self._slot(number, math.prod(shape) * dtype.itemsize, dtype).clone()
        self._taken.set((number + 1) % _WORDS)
        return x.view(*shape)

    def _slot(self, number: int, num_bytes: int, dtype: torch.dtype) -> Tensor:
        return self._slots[number % self._num_slots, :num_bytes].view(dtype)

    def _wait(self, word: futex.Word, is_due: Callable[[int], bool]) -> None:
        for _ in range(self._spins):
            if is_due(word.value):
                return
        while not is_due(seen := word.value):
            word.wait_for_change(seen, _CHECK_S)
            if word.value == seen:
                self._check()
