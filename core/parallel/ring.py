"""The messages from a core to the other ranks, through memory that all of them map.

The core writes a message into the next slot, raises the number of messages, and writes to the event descriptor of each
rank. A rank looks at the number for a moment, then sleeps on its descriptor, so that an idle rank uses no processor
time. A slot is written again only after all ranks have read it. Each message has a checksum: it tells a message that is
not completely visible yet from one that is, also on machines that reorder stores, and finds foreign writes.
"""

import ctypes
import mmap
import os
import select
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Final

_HEADER: Final = struct.Struct("<QII")
"""Number of the message from 1, its length in bytes, and its CRC-32."""
_LINE: Final = 64
SPIN_S: Final = 0.5e-3
"""Time for which a rank with CPUs of its own looks for the next message before it sleeps: as between two steps."""
_VISIBLE_S: Final = 1.0
"""Time in which a message must become readable after its number."""
_PAUSE_S: Final = 50e-6


class RingError(RuntimeError):
    """Raised for a message that is not what the core has written."""


class Progress:
    """The state of a rank in the shared memory: two counters that it alone writes."""

    def __init__(self, address: int) -> None:
        fields = ctypes.c_uint64 * 2
        self._fields = fields.from_address(address)

    @property
    def num_read(self) -> int:
        """Number of messages that the rank has finished reading."""
        return self._fields[0]

    @num_read.setter
    def num_read(self, value: int) -> None:
        self._fields[0] = value

    @property
    def num_beats(self) -> int:
        """A number that grows while the rank makes progress."""
        return self._fields[1]

    def beat(self) -> None:
        """Show progress."""
        self._fields[1] += 1


class MessageRing:
    """The ring as its writer and its readers see it."""

    def __init__(self, memory: mmap.mmap, offset: int, num_readers: int, slot_bytes: int, num_slots: int = 4) -> None:
        """Use the `num_bytes` of `memory` from `offset` on, which are initially zero."""
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory, offset))
        self._memory = memory
        self._head = ctypes.c_uint64.from_address(base)
        self.progress = [Progress(base + _LINE * (1 + reader)) for reader in range(num_readers)]
        """By reader."""
        self._slots_at = offset + _page_ceil(_LINE * (1 + num_readers))
        self._slot_bytes = slot_bytes
        self._num_slots = num_slots

    @staticmethod
    def num_bytes(num_readers: int, slot_bytes: int, num_slots: int = 4) -> int:
        """Return the bytes of shared memory that a ring needs; slots that no message has reached take no memory."""
        return _page_ceil(_LINE * (1 + num_readers)) + _page_ceil(num_slots * slot_bytes)

    @property
    def num_written(self) -> int:
        return self._head.value

    def write(
        self,
        parts: Sequence[bytes],
        wake: Sequence[int],
        check: Callable[[], None],
        readers: Sequence[int] | None = None,
    ) -> None:
        """Write a message made of `parts`, and wake the readers by their event descriptors `wake`.

        While one of `readers`, by default of all, is behind by the whole ring, `check` is called, which may raise.
        Raises ValueError for a message that does not fit a slot.
        """
        number = self._head.value + 1
        length = sum(len(part) for part in parts)
        if length > self._slot_bytes - _HEADER.size:
            raise ValueError(f"a message of {length:,} bytes does not fit a slot of {self._slot_bytes:,} bytes")
        waited = self.progress if readers is None else [self.progress[reader] for reader in readers]
        while any(number - reader.num_read > self._num_slots for reader in waited):
            check()
            time.sleep(_PAUSE_S)
        at = first = self._slot(number)
        at += _HEADER.size
        checksum = 0
        for part in parts:
            self._memory[at : at + len(part)] = part
            checksum = zlib.crc32(part, checksum)
            at += len(part)
        _HEADER.pack_into(self._memory, first, number, length, checksum)
        self._head.value = number
        for descriptor in wake:
            os.eventfd_write(descriptor, 1)

    def read(self, reader: int, event: int, others: Sequence[int], spin_s: float = 0.0) -> bytes | None:
        """Wait for the next message and return it; return None if one of the descriptors `others` has ended.

        The reader looks for the message for `spin_s` seconds before it sleeps. Raises RingError for a message that is
        damaged.
        """
        number = self.progress[reader].num_read + 1
        deadline = time.monotonic() + spin_s
        while self._head.value < number and time.monotonic() < deadline:
            pass
        if self._head.value < number:
            poll = select.poll()
            poll.register(event, select.POLLIN)
            for descriptor in others:
                poll.register(descriptor, select.POLLHUP)
            while self._head.value < number:
                for descriptor, _ in poll.poll():
                    if descriptor != event:
                        return None
                    os.eventfd_read(event)
        message = self._visible(number)
        self.progress[reader].num_read = number
        return message

    def _visible(self, number: int) -> bytes:
        """Return the message with this number, once all of its bytes have arrived."""
        at = self._slot(number)
        deadline = time.monotonic() + _VISIBLE_S
        while True:
            stored, length, checksum = _HEADER.unpack_from(self._memory, at)
            if stored == number and length <= self._slot_bytes - _HEADER.size:
                message = self._memory[at + _HEADER.size : at + _HEADER.size + length]
                if zlib.crc32(message) == checksum:
                    return message
            if time.monotonic() > deadline:
                raise RingError(f"message {number} of the core is damaged: its slot holds number {stored}")

    def _slot(self, number: int) -> int:
        return self._slots_at + number % self._num_slots * self._slot_bytes


def _page_ceil(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
