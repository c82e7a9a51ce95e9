"""Which tokens each block of the KV cache holds, in memory that outlives the core, for the core after it.

An entry names its block's content: the hash of all tokens before the block, the tokens in it, and the block's own hash
once it is full. So an entry that is wrong by a flipped bit is found by no request, and is never served. Its word, which
says how many tokens are valid, is written last, in a single store, after the step that has computed the tokens; it is
zero from before the block is given to another request. So wherever the core dies between two writes, an entry with a
valid word describes what the block holds.

Beside the entries the table has when the use of each block ended. Blocks that were in use are the last that the next
core evicts, because the requests that continue look for them, however long ago they were computed.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

HASH_BYTES: Final = 32
NO_TOKEN: Final = -1
"""In place of the tokens of a block that only its own hash describes."""
_IN_USE: Final = 1 << 62
"""In place of when the use of a block ended; larger numbers count as it, which a flipped bit makes of it."""
_SHIFT, _MASK = 32, 0x5EA1ED00
"""A word is its count of tokens, and shifted by `_SHIFT` the count combined with `_MASK`."""


class FoundBlock(NamedTuple):
    """A block of an earlier core."""

    block: int
    before: bytes
    """Hash of all tokens before the block."""
    tokens: npt.NDArray[np.int32]
    """[n] the tokens in it; `NO_TOKEN` for embeddings."""
    digest: bytes | None
    """Its own hash; None: the block is not full."""


class FoundBlocks:
    """Blocks of an earlier core, by columns: a block on its own is made when it is asked for.

    The first are those whose use ended first, the last those that were in use.
    """

    def __init__(
        self,
        blocks: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        before: npt.NDArray[np.uint8],
        digests: npt.NDArray[np.uint8],
        tokens: npt.NDArray[np.int32],
    ) -> None:
        """`blocks` [n], the `counts` [n] of their tokens, and what else `SealTable` has of them, [n, ...] each."""
        self._block_ids = blocks
        self.blocks: list[int] = blocks.tolist()
        self.before = _each_row(before)
        """[n] hash of all tokens before each block."""
        self.digests = _each_row(digests)
        """[n] own hash of each block, if it is full."""
        self.is_full: npt.NDArray[np.bool_] = counts == tokens.shape[1]
        """[n]"""
        self._counts = counts
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[FoundBlock]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> FoundBlock:
        return FoundBlock(
            self.blocks[index],
            self.before[index],
            self._tokens[index, : self._counts[index]],
            self.digests[index] if self.is_full[index] else None,
        )

    def compare(
        self, indices: list[int], tokens: npt.NDArray[np.int32]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the blocks [n] at `indices`, with how many of `tokens` [m] each begins, and how many others it has."""
        at, width = np.array(indices), min(len(tokens), self._tokens.shape[1])
        differs = self._tokens[at, :width] != tokens[:width]
        num_equal = np.where(differs.any(axis=1), differs.argmax(axis=1), width)
        num_common = np.minimum(num_equal, self._counts[at])
        return self._block_ids[at], num_common, self._counts[at] - num_common


class SealTable:
    """An entry for each block, the padding block included."""

    def __init__(self, memory: Any, num_blocks: int, block_size: int) -> None:
        """Use the `num_bytes` of `memory`, a writable buffer; all zeros are a table without entries."""
        fields = _fields(num_blocks, block_size)
        offsets = np.cumsum([0, *(np.dtype(kind).itemsize * int(np.prod(shape)) for shape, kind in fields)]).tolist()
        arrays = [
            np.frombuffer(memory, kind, int(np.prod(shape)), offset).reshape(shape)
            for (shape, kind), offset in zip(fields, offsets, strict=False)
        ]
        self._words, self._ages, self._before, self._digests, self._tokens, self._ends = arrays
        self._block_size = block_size
        self._age = int(self._ages.max(initial=0))
        self._num_ends = int(self._ends.max(initial=0, where=self._ends < _IN_USE))

    @staticmethod
    def num_bytes(num_blocks: int, block_size: int) -> int:
        """Return the bytes of memory that a table needs."""
        return sum(np.dtype(kind).itemsize * int(np.prod(shape)) for shape, kind in _fields(num_blocks, block_size))

    def clear(self) -> None:
        """Remove all entries."""
        self._words[:] = 0

    def forget(self, blocks: npt.NDArray[np.int32]) -> None:
        """Remove the entries of `blocks` [n], before anything is written to them."""
        self._words[blocks] = 0

    def note_use(self, blocks: npt.NDArray[np.int32] | list[int]) -> None:
        """Note that `blocks` [n] are in use."""
        self._ends[blocks] = _IN_USE

    def note_end(self, blocks: list[int]) -> None:
        """Note that the use of `blocks` has ended, of one after the other."""
        self._ends[blocks] = np.arange(self._num_ends, self._num_ends + len(blocks)) + 1
        self._num_ends += len(blocks)

    def begin_step(self) -> None:
        """Count a step: what is noted from now on is younger than what was noted before."""
        self._age += 1

    def note_before(self, blocks: npt.NDArray[np.int32], hashes: Sequence[bytes]) -> None:
        """Note the hashes of all tokens before `blocks` [n], which have no entries yet."""
        self._before[blocks] = _rows(hashes)

    def note_full(self, blocks: npt.NDArray[np.int32], hashes: Sequence[bytes]) -> None:
        """Note the own hashes of `blocks` [n], which `seal` then makes valid."""
        self._digests[blocks] = _rows(hashes)

    def note_tokens(
        self, blocks: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64], tokens: npt.NDArray[np.int32] | int
    ) -> None:
        """Note `tokens` [n] at the `offsets` [n] of `blocks` [n]."""
        self._tokens[blocks, offsets] = tokens

    def seal(self, blocks: npt.NDArray[np.int32], counts: npt.NDArray[np.int64] | int) -> None:
        """Let the first `counts` [n] tokens of `blocks` [n] be valid; all that describes them must be noted."""
        self._ages[blocks] = self._age
        self._words[blocks] = counts | (counts ^ _MASK) << _SHIFT

    def found(self) -> FoundBlocks:
        """Return what the valid entries describe; entries whose word is damaged are none."""
        counts = _valid_counts(self._words, self._block_size)
        blocks = np.flatnonzero(counts > 0)
        blocks = blocks[np.lexsort((self._ages[blocks], self._ends[blocks]))]
        return FoundBlocks(blocks, counts[blocks], self._before[blocks], self._digests[blocks], self._tokens[blocks])


class SealReader:
    """Reads the table of a core in another process, which may end or give the memory back at any moment."""

    def __init__(self, descriptor: int, begin: int, num_blocks: int, block_size: int) -> None:
        """The table lies `begin` bytes from the start of the file."""
        self._descriptor = descriptor
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._words_at = begin
        self._ages_at = self._words_at + 8 * num_blocks
        self._before_at = self._ages_at + 8 * num_blocks
        self._digests_at = self._before_at + HASH_BYTES * num_blocks

    def full(self) -> npt.NDArray[np.int64]:
        """Return the age [num_blocks] of each full block, and -1 for the others. Raises OSError."""
        data = os.pread(self._descriptor, 16 * self._num_blocks, self._words_at)
        if len(data) < 16 * self._num_blocks:
            return np.full(self._num_blocks, -1, np.int64)
        words, ages = np.frombuffer(data, np.int64).reshape(2, self._num_blocks)
        return np.where(_valid_counts(words, self._block_size) == self._block_size, ages, -1)

    def hashes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the hashes [num_blocks] of all tokens before each block, and the own ones. Raises OSError.

        They may change in the meantime.
        """
        size = 2 * HASH_BYTES * self._num_blocks
        data = os.pread(self._descriptor, size, self._before_at).ljust(size, b"\0")
        before, digests = np.frombuffer(data, np.uint8).reshape(2, self._num_blocks, HASH_BYTES)
        return _each_row(before), _each_row(digests)

    def entry(self, block: int) -> tuple[bytes, bytes, bytes, bytes]:
        """Return word, age, hash of all tokens before, and own hash of `block`. Raises OSError.

        Read an entry before and after the content: they are the same only if the content is.
        """
        return (
            os.pread(self._descriptor, 8, self._words_at + 8 * block),
            os.pread(self._descriptor, 8, self._ages_at + 8 * block),
            os.pread(self._descriptor, HASH_BYTES, self._before_at + HASH_BYTES * block),
            os.pread(self._descriptor, HASH_BYTES, self._digests_at + HASH_BYTES * block),
        )


def _valid_counts(words: npt.NDArray[np.int64], block_size: int) -> npt.NDArray[np.int64]:
    """Return how many tokens [num_blocks] are valid; 0 for a word that is damaged, and for the padding block."""
    counts = words & (1 << _SHIFT) - 1
    is_valid = (words >> _SHIFT == counts ^ _MASK) & (counts <= block_size)
    is_valid[0] = False
    return np.where(is_valid, counts, 0)


def _fields(num_blocks: int, block_size: int) -> list[tuple[tuple[int, ...], type[np.generic]]]:
    """Return shape and type of each column of the table."""
    return [
        ((num_blocks,), np.int64),
        ((num_blocks,), np.int64),
        ((num_blocks, HASH_BYTES), np.uint8),
        ((num_blocks, HASH_BYTES), np.uint8),
        ((num_blocks, block_size), np.int32),
        ((num_blocks,), np.int64),
    ]


def _each_row(hashes: npt.NDArray[np.uint8]) -> list[bytes]:
    """Return the hashes [n, HASH_BYTES] one by one."""
    rows: list[bytes] = hashes.view(f"V{HASH_BYTES}")[:, 0].tolist()
    return rows


def _rows(hashes: Sequence[bytes]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, HASH_BYTES)
