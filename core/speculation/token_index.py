"""Where the same few tokens stood before in a sequence, found at once however long the sequence is."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]

_FACTOR: Final = 0x9E3779B97F4A7C15
_MASK: Final = 2**64 - 1


class TokenIndex:
    """A growing sequence, and the ends of all of its n-grams by their hash.

    What the sequence holds at the first call, its prompt, is sorted once. What follows goes into a dict. A token takes
    about 120 bytes of host memory. All of it is in lists, because single elements of an array are slow to read.
    """

    def __init__(self, size: int) -> None:
        """`size` is the number of tokens of an n-gram."""
        self.tokens: list[int] = []
        """[num_tokens] the sequence."""
        self._size = size
        self._keys: list[int] = []
        """[n] hashes of the n-grams of the prompt, ascending."""
        self._ends: list[int] = []
        """[n] their ends; those with the same hash are ascending."""
        self._later: dict[int, list[int]] = {}
        """By hash, the ends of the n-grams that came later, ascending."""
        self._num_indexed = 0
        """Number of tokens, from the first, whose n-grams are in the index."""

    def find(self, tokens: TokenIds, most: int) -> list[int]:
        """Return up to `most` ends of earlier n-grams that are like the last one of `tokens` [n], the latest first.

        `tokens` begin with those of the call before. The number of tokens before an end is that end, and few of the
        n-grams may be others with the same hash.
        """
        known = self.tokens
        known += tokens[len(known) :].tolist()
        if not self._num_indexed:
            self._sort(tokens[:-1])
        else:
            self._add(len(known) - 1)
        self._num_indexed = len(known) - 1
        if len(known) <= self._size:
            return []
        key = hash_of(known[-self._size :])
        found = self._later.get(key, [])[-most:][::-1]
        last = bisect_right(self._keys, key)
        while last and len(found) < most and self._keys[last - 1] == key:
            last -= 1
            found.append(self._ends[last])
        return found

    def _sort(self, tokens: TokenIds) -> None:
        """Index the n-grams of `tokens` [n], the first of the sequence."""
        size = self._size
        if len(tokens) < size:
            return
        keys = hashes(tokens, size)
        order = np.argsort(keys, kind="stable")
        self._keys, self._ends = keys[order].tolist(), (order + size).tolist()

    def _add(self, num_tokens: int) -> None:
        """Index the n-grams of the first `num_tokens` tokens that are not in the index yet."""
        size, tokens = self._size, self.tokens
        for end in range(max(self._num_indexed + 1, size), num_tokens + 1):
            self._later.setdefault(hash_of(tokens[end - size : end]), []).append(end)


def hashes(tokens: TokenIds, size: int) -> npt.NDArray[np.uint64]:
    """Return the hash of each n-gram of `size` tokens in `tokens` [n]: [n - size + 1]."""
    wide = tokens.astype(np.uint64)
    keys = np.zeros(len(tokens) - size + 1, np.uint64)
    for offset in range(size):
        keys = keys * np.uint64(_FACTOR) + wide[offset : offset + len(keys)] + np.uint64(1)
    return keys


def hash_of(tokens: Sequence[int]) -> int:
    """Return the hash of an n-gram, as `hashes` does."""
    key = 0
    for token in tokens:
        key = (key * _FACTOR + token + 1) & _MASK
    return key


def common_suffix(tokens: Sequence[int], others: Sequence[int], end: int, most: int) -> int:
    """Return with how many equal tokens `tokens` [n] and the first `end` of `others` end, at most `most`."""
    count, last, most = 0, len(tokens) - 1, min(most, end, len(tokens))
    while count < most and tokens[last - count] == others[end - 1 - count]:
        count += 1
    return count
