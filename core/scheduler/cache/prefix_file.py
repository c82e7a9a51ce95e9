"""The prefix cache file: blocks of the KV cache on disk, which the cores after a restart find by their hashes.

A header, an entry for each slot (the block's hash, that of what precedes it, a check), the times of last use, and the
slots.
The core reads blocks, and a process beside it writes them (`prefix_writer`); neither waits for the other, and nothing
is synchronized with the disk. Whatever a block's bytes have become, by a write that was cut off, a flipped bit or a
write in the meantime, its check tells: it covers the hashes, the content and the nonce of the header, which is another
one each time the file is emptied.

Of blocks that are used together, the beginning counts as used last: without it, the others are never found.
"""

import hashlib
import logging
import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from vllm_mp.core.scheduler.cache.file_header import HEADER_BYTES, read_header, write_header
from vllm_mp.core.scheduler.cache.seal_table import HASH_BYTES

logger = logging.getLogger(__name__)

CHECK_BYTES: Final = 8
_ROW_BYTES: Final = 2 * HASH_BYTES + CHECK_BYTES
_TIME_BYTES: Final = 8
_VERSION: Final = 1
_ALIGNMENT: Final = 4096
_MAX_VECTORS: Final = 1024
"""Number of buffers that the system fills in one call."""


class PrefixFileHeader(msgspec.Struct, array_like=True, frozen=True):
    """What the file holds."""

    version: int
    fingerprint: str
    """The `file_fingerprint` of `KeptHeader`."""
    slot_bytes: int
    num_slots: int
    nonce: str

    @property
    def times_at(self) -> int:
        """Where the times of last use begin in the file."""
        return HEADER_BYTES + self.num_slots * _ROW_BYTES

    @property
    def slots_at(self) -> int:
        """Where the slots begin in the file."""
        return -(-(self.times_at + self.num_slots * _TIME_BYTES) // _ALIGNMENT) * _ALIGNMENT

    @property
    def fits(self) -> bool:
        """Whether this version understands the file, and its sizes make sense."""
        return self.version == _VERSION and self.slot_bytes > 0 and self.num_slots > 0


class PrefixFile:
    """The file behind a descriptor, as one process knows it. All methods raise OSError if the system does."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.header: PrefixFileHeader | None = None
        """None: the file is of no use at present."""
        self._rows = np.zeros((0, _ROW_BYTES), np.uint8)
        """The entries; zeros: the slot is free."""
        self._slot_of: dict[bytes, int] = {}

    def prepare(self, fingerprint: str, slot_bytes: int, max_bytes: int) -> None:
        """Use the file for blocks of `slot_bytes`, and empty it first unless it is for the same ones.

        Raises ValueError if not a single block fits into `max_bytes`.
        """
        room = max_bytes - HEADER_BYTES - _ALIGNMENT
        num_slots = room // (slot_bytes + _ROW_BYTES + _TIME_BYTES)
        if num_slots < 1:
            raise ValueError(
                f"prefix_cache_file_bytes={max_bytes} is too small for a single block of {slot_bytes:,} bytes; raise it"
            )
        self.load()
        found, wanted = self.header, PrefixFileHeader(_VERSION, fingerprint, slot_bytes, num_slots, "")
        if found is not None and msgspec.structs.replace(found, nonce="") == wanted:
            logger.info("the prefix cache file has %d of at most %d blocks", len(self._slot_of), num_slots)
            return
        if os.fstat(self._descriptor).st_size:
            logger.info("the prefix cache file is of another model, layout or size, or damaged: it is emptied")
        self._begin(wanted)

    def load(self) -> None:
        """Learn what the file holds now."""
        header = read_header(self._descriptor, PrefixFileHeader)
        if header is not None and not header.fits:
            header = None
        if header != self.header:
            self.header, self._slot_of = header, {}
            self._rows = np.zeros((0 if header is None else header.num_slots, _ROW_BYTES), np.uint8)
        if header is None:
            return
        data = os.pread(self._descriptor, header.num_slots * _ROW_BYTES, HEADER_BYTES)
        # The file may end among its entries: those that are missing are none.
        rows = np.frombuffer(data.ljust(header.num_slots * _ROW_BYTES, b"\0"), np.uint8).reshape(self._rows.shape)
        words = rows.view(np.uint64)
        for slot in np.flatnonzero((words != self._rows.view(np.uint64)).any(axis=1)).tolist():
            self._forget(slot)
            if words[slot].any():
                self._slot_of[rows[slot, :HASH_BYTES].tobytes()] = slot
        self._rows = rows.copy()

    def clear(self) -> None:
        """Remove all blocks."""
        if self.header is not None:
            self._begin(self.header)

    def abandon(self) -> None:
        """Empty the file, and use it no more; no process writes to it before the next `prepare`."""
        self.header, self._slot_of = None, {}
        os.ftruncate(self._descriptor, 0)

    def has(self, digest: bytes) -> bool:
        """Return whether the file has the block with this hash, as far as this process knows."""
        return digest in self._slot_of

    def read(self, digest: bytes, views: Sequence[memoryview]) -> bool:
        """Read the block with this hash, which `has` knows, into `views`; return False if its content is damaged.

        `views` then hold anything, and the block is removed from the file.
        """
        header = self.header
        assert header is not None
        slot = self._slot_of[digest]
        row = self._rows[slot].tobytes()
        offset = header.slots_at + slot * header.slot_bytes
        for first in range(0, len(views), _MAX_VECTORS):
            part = views[first : first + _MAX_VECTORS]
            os.preadv(self._descriptor, part, offset)
            offset += sum(view.nbytes for view in part)
        if row[2 * HASH_BYTES :] == self._check(header, row[: 2 * HASH_BYTES], views):
            return True
        self._forget(slot)
        where = HEADER_BYTES + slot * _ROW_BYTES
        if os.pread(self._descriptor, _ROW_BYTES, where) == row:  # else the slot has another block by now
            os.pwrite(self._descriptor, bytes(_ROW_BYTES), where)
            logger.warning("a block of the prefix cache file is damaged and is computed again")
        return False

    def expect(self, digests: Iterable[bytes]) -> None:
        """Let the system fetch the blocks with these hashes from the disk in the background."""
        for slot in self._slots(digests):
            assert self.header is not None
            size = self.header.slot_bytes
            os.posix_fadvise(self._descriptor, self.header.slots_at + slot * size, size, os.POSIX_FADV_WILLNEED)

    def note_used(self, digests: Sequence[bytes]) -> None:
        """Note that the blocks with these hashes are used now, as far as the file has them; they follow one another."""
        self._write_times({slot: depth for depth, slot in enumerate(self._slots(digests))})

    def free_slots(self) -> list[int]:
        """Return the slots without a block."""
        return np.flatnonzero(~self._rows.any(axis=1)).tolist()

    def least_recently_used(self) -> list[int]:
        """Return the slots with a block, in the order in which they were last used."""
        assert self.header is not None
        size = self.header.num_slots * _TIME_BYTES
        data = os.pread(self._descriptor, size, self.header.times_at).ljust(size, b"\0")
        taken = np.flatnonzero(self._rows.any(axis=1))
        slots: list[int] = taken[np.argsort(np.frombuffer(data, np.int64)[taken], kind="stable")].tolist()
        return slots

    def num_slots_on_disk(self) -> int:
        """Return how many slots the file has at its size."""
        assert self.header is not None
        return max(0, os.fstat(self._descriptor).st_size - self.header.slots_at) // self.header.slot_bytes

    def remove(self, slot: int) -> None:
        """Remove the block in `slot`."""
        os.pwrite(self._descriptor, bytes(_ROW_BYTES), HEADER_BYTES + slot * _ROW_BYTES)
        self._forget(slot)

    def write(self, slot: int, before: bytes, digest: bytes, content: memoryview) -> bytes:
        """Write `content`, the block with the hash `digest`, into a free slot; return the entry for `add`.

        `before` is the hash of all tokens before it.
        """
        header = self.header
        assert header is not None
        offset = header.slots_at + slot * header.slot_bytes
        done = 0
        while done < len(content):
            # A disk that becomes full takes a part first, and then says why not the rest.
            done += os.pwrite(self._descriptor, content[done:], offset + done)
        return digest + before + self._check(header, digest + before, [content])

    def add(self, entries: Mapping[int, bytes]) -> None:
        """Let the blocks that `write` has written into these slots be found, and note them and those before as used."""
        for slot, entry in entries.items():
            os.pwrite(self._descriptor, entry, HEADER_BYTES + slot * _ROW_BYTES)
            self._rows[slot] = np.frombuffer(entry, np.uint8)
            self._slot_of[entry[:HASH_BYTES]] = slot
        self.note_chains([entry[:HASH_BYTES] for entry in entries.values()])

    def note_chains(self, digests: Iterable[bytes]) -> set[int]:
        """Note that the blocks with these hashes and all before them are used now, as far as the file has them.

        Return their slots.
        """
        depths: dict[int, int] = {}
        for slot in self._slots(digests):
            chain = []
            at: int | None = slot
            while at is not None and at not in depths:
                depths[at] = 0  # so that a damaged entry leads into no circle
                chain.append(at)
                at = self._slot_of.get(self._rows[at, HASH_BYTES : 2 * HASH_BYTES].tobytes())
            first = 0 if at is None else depths[at] + 1
            depths |= {link: depth for depth, link in enumerate(reversed(chain), first)}
        self._write_times(depths)
        return set(depths)

    def _write_times(self, depths: Mapping[int, int]) -> None:
        """Note that the blocks in these slots are used now, each with how many precede it."""
        if not depths:
            return
        assert self.header is not None
        slots = np.array(sorted(depths))
        times = time.time_ns() - np.array([depths[slot] for slot in slots.tolist()], np.int64)
        for run in np.split(np.arange(len(slots)), np.flatnonzero(np.diff(slots) > 1) + 1):  # a write for each range
            where = self.header.times_at + int(slots[run[0]]) * _TIME_BYTES
            os.pwrite(self._descriptor, times[run].tobytes(), where)

    def _begin(self, header: PrefixFileHeader) -> None:
        """Empty the file, and give it a header with another nonce."""
        os.ftruncate(self._descriptor, 0)
        # If blocks filled the disk first, none could become an entry.
        os.posix_fallocate(self._descriptor, 0, header.slots_at)
        write_header(self._descriptor, msgspec.structs.replace(header, nonce=secrets.token_hex(16)))
        self.load()

    def _slots(self, digests: Iterable[bytes]) -> list[int]:
        return [slot for digest in digests if (slot := self._slot_of.get(digest)) is not None]

    def _forget(self, slot: int) -> None:
        digest = self._rows[slot, :HASH_BYTES].tobytes()
        if self._slot_of.get(digest) == slot:
            del self._slot_of[digest]
        self._rows[slot] = 0

    def _check(self, header: PrefixFileHeader, hashes: bytes, content: Sequence[memoryview]) -> bytes:
        """Return the check of a block with these hashes.

        BLAKE2 with 64 bits: as fast as the memory here, on every processor, and in the standard library.
        """
        check = hashlib.blake2b(hashes, digest_size=CHECK_BYTES, key=header.nonce.encode())
        for part in content:
            check.update(part)
        return check.digest()
