"""The process that writes full blocks of the KV cache to the prefix cache file, beside the core.

It belongs to the core's parent, and reads the memory that the parent keeps: so it takes nothing of the core's time,
goes on when a core dies, and writes what is left when the parent ends. It runs only while a processor is idle.

A block that was copied becomes an entry `_TRUST_S` later, if the memory is still trusted then: a core that has written
where it should not soon dies of it, and the parent then zeroes the header of the memory.
"""

import contextlib
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_mp.core.scheduler.cache.file_header import HEADER_BYTES, KeptHeader, read_header
from vllm_mp.core.scheduler.cache.prefix_file import PrefixFile
from vllm_mp.core.scheduler.cache.seal_table import SealReader
from vllm_mp.machine.log_setup import set_up_core_log

logger = logging.getLogger(__name__)

_TRUST_S: Final = 1.0
_TURN_BYTES: Final = 64 * 2**20
_TURN_PAUSE_S: Final = 0.25
"""Time after a turn that had something to do; so at most 256 MiB are written in a second."""
_IDLE_PAUSE_S: Final = 1.0
_FULL_PAUSE_S: Final = 60.0
"""Time after which a full disk is tried again."""
_LOWEST_PRIORITY: Final = 19
_END_S: Final = 2.5
"""Time that the last turn may take; a next engine waits for the file a little longer."""


class _Copied(NamedTuple):
    """A block whose content is in the file, and which is not an entry yet."""

    due: float
    slot: int
    entry: bytes


class PrefixWriter:
    """Copies full blocks from the memory with the KV cache to the file."""

    def __init__(self, memory: int, file: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`memory` and `file` are descriptors; `clock` returns seconds."""
        self._memory = memory
        self._file = PrefixFile(file)
        self._clock = clock
        self._kept: KeptHeader | None = None
        self._nonce = ""
        """That of the file."""
        self._seen = np.zeros(0, np.int64)
        """[num_blocks] the age of what was dealt with last in each block."""
        self._copied: dict[bytes, _Copied] = {}
        """By hash, the earliest first."""
        self._limit = 0
        """Number of slots that the disk has room for, as far as known."""
        self._retry_at = 0.0
        self._is_told = False
        """The log says that the disk is full."""

    def turn(self, is_last: bool = False) -> float:
        """Copy what is new, up to a bound, and make entries of what was copied; return the seconds until the next turn.

        The last turn is bounded by its time alone, and makes entries of all blocks.
        """
        try:
            return self._turn(is_last)
        except OSError as error:
            self._note_full(error)
            return _IDLE_PAUSE_S

    def _turn(self, is_last: bool) -> float:
        if not self._follow():
            self._copied.clear()
            return _IDLE_PAUSE_S
        kept = self._kept
        assert kept is not None
        table = SealReader(self._memory, HEADER_BYTES, kept.num_blocks, kept.block_size)
        ages = table.full()
        new = np.flatnonzero((ages >= 0) & (ages != self._seen))
        if not len(new) and not self._copied:
            return _IDLE_PAUSE_S
        self._file.load()
        if is_last:
            self._make_entries(is_last)  # only then newer blocks can take their slots
        if len(new) and self._kept is not None:
            self._copy(table, new[np.argsort(ages[new], kind="stable")].tolist(), ages, is_last)
        self._make_entries(is_last)
        return _TURN_PAUSE_S

    def _follow(self) -> bool:
        """Learn of what memory and file are; return whether blocks of the one belong into the other."""
        kept, now = read_header(self._memory, KeptHeader), self._clock()
        if self._file.header is None or kept != self._kept:
            self._file.load()
        header = self._file.header
        if kept is None or header is None or header.fingerprint != kept.file_fingerprint:
            self._kept = None
            return False
        if kept != self._kept or header.nonce != self._nonce:
            self._kept, self._nonce = kept, header.nonce
            self._seen = np.full(kept.num_blocks, -1, np.int64)
            self._copied.clear()
            self._limit = header.num_slots
        if now >= self._retry_at:
            self._limit = header.num_slots
        return True

    def _copy(self, table: SealReader, blocks: list[int], ages: npt.NDArray[np.int64], is_last: bool) -> None:
        """Write the contents of `blocks` to free slots, and to those that were not used for longest.

        If there are more blocks than slots, the newest and what precedes them are written.
        """
        header = self._file.header
        if header is None or header.nonce != self._nonce:
            return  # the file was emptied since `_follow`
        before, digests = table.hashes()
        in_memory = {digests[block] for block in np.flatnonzero(ages >= 0)}
        self._pass([block for block in blocks if self._has(digests[block])], ages)
        newest = _in_order([block for block in blocks[::-1] if not self._has(digests[block])], before, digests)
        reserved = {copied.slot for copied in self._copied.values()}
        free = [slot for slot in self._file.free_slots() if slot not in reserved and slot < self._limit][::-1]
        old: list[int] = []
        if len(free) < len(newest):
            kept = reserved | self._file.note_chains([before[block] for block in newest])
            old = [slot for slot in self._file.least_recently_used() if slot not in kept][::-1]
        room = len(free) + len(old)
        # There may be more room when the reserved slots have become entries.
        self._pass(newest[header.num_slots if reserved else room :], ages)
        chosen = set(newest[:room])
        blocks = _in_order([block for block in blocks if block in chosen], before, digests)
        content = memoryview(bytearray(header.slot_bytes))
        begin, num_bytes = self._clock(), 0
        for block in blocks:
            if (self._clock() > begin + _END_S) if is_last else (num_bytes >= _TURN_BYTES):
                return
            entry = table.entry(block)
            previous, digest = entry[-2:]
            # Without what precedes it, a block is never found.
            if self._has(digest) or (previous in in_memory and not self._has(previous)):
                self._pass([block], ages)
                continue
            if not self._read(block, content) or table.entry(block) != entry:
                continue  # the block has another content now, and another age
            if not free:
                free.append(old.pop())
                self._file.remove(free[-1])
            slot = free.pop()
            try:
                row = self._file.write(slot, previous, digest, content)
            except OSError as error:
                self._note_full(error)
                return
            self._copied[digest] = _Copied(self._clock() + _TRUST_S, slot, row)
            num_bytes += len(content)
            self._pass([block], ages)

    def _has(self, digest: bytes) -> bool:
        """Return whether the block with this hash is in the file, as an entry or copied."""
        return self._file.has(digest) or digest in self._copied

    def _pass(self, blocks: list[int], ages: npt.NDArray[np.int64]) -> None:
        """Deal with `blocks` no more until they hold something else."""
        self._seen[blocks] = ages[blocks]

    def _read(self, block: int, content: memoryview) -> bool:
        """Read what `block` holds into `content`; return False if the memory was given back."""
        assert self._kept is not None
        at = 0
        for begin, size in self._kept.segments:
            part = content[at : at + size]
            if os.preadv(self._memory, [part], begin + block * size) < size:
                return False
            at += size
        return True

    def _make_entries(self, is_last: bool) -> None:
        """Make entries of the blocks that were copied long enough ago, if the memory is still trusted."""
        header = self._file.header
        if header is None or header.nonce != self._nonce or read_header(self._memory, KeptHeader) != self._kept:
            # A next core may only be about to write the same header again: then the blocks are copied once more.
            self._kept = None
            self._copied.clear()
            return
        now = self._clock()
        due = {digest: copied for digest, copied in self._copied.items() if copied.due <= now or is_last}
        self._file.add({copied.slot: copied.entry for copied in due.values()})
        for digest in due:
            del self._copied[digest]

    def _note_full(self, error: OSError) -> None:
        """Do not let the file grow for a while; what it has is replaced by what is newer."""
        if not self._is_told:
            self._is_told = True
            logger.warning("the prefix cache file cannot be written, and does not grow for now: %s", error)
        self._retry_at = self._clock() + _FULL_PAUSE_S
        self._limit = 0
        if self._file.header is not None:
            self._limit = self._file.num_slots_on_disk()


def _in_order(blocks: list[int], before: list[bytes], digests: list[bytes]) -> list[int]:
    """Return `blocks` in their order, but none before the one that precedes it; the hashes are by block."""
    block_of = {digests[block]: block for block in blocks}
    ordered: dict[int, None] = {}
    for block in blocks:
        chain: dict[int, None] = {}
        at: int | None = block
        while at is not None and at not in ordered and at not in chain:
            chain[at] = None
            at = block_of.get(before[at])
        ordered |= dict.fromkeys(reversed(chain))
    return list(ordered)


def run_when_idle() -> None:
    """Let this process run only while a processor is idle."""
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:  # as a sandbox may decide
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, _LOWEST_PRIORITY)


def main() -> None:
    """Copy until standard input ends or has something to read, or the parent dies; then copy the rest."""
    memory, file = map(int, sys.argv[1:3])
    set_up_core_log("prefix cache file")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the end of the parent decides
    parent = os.getppid()
    writer = PrefixWriter(memory, file)
    poll = select.poll()
    poll.register(0, select.POLLIN)

    def ends(wait_s: float = 0.0) -> bool:
        # A child that the parent forked may hold the other end of the pipe open after the parent's death.
        return bool(poll.poll(1000 * wait_s)) or os.getppid() != parent

    # On a busy machine what is left to do would take this process minutes at that priority, and the file stays locked.
    if not ends():
        run_when_idle()
        pause = 0.0
        while not ends(pause):
            pause = writer.turn()
        with contextlib.suppress(OSError):  # only a privileged process may
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    writer.turn(is_last=True)


if __name__ == "__main__":
    main()
