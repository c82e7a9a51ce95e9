"""Drafts from the request itself: what followed the last few tokens when they stood there before.

The method is prompt lookup decoding (Saxena 2023). It needs no second model, and pays where an answer repeats parts of
its prompt or of itself: edits, quotes, code.
"""

from typing import Final

from vllm_mp.core.speculation.proposer import NOTHING, Proposal
from vllm_mp.core.speculation.token_index import TokenIds, TokenIndex, common_suffix

_MOST_ENDS: Final = 8
"""Number of earlier places that are compared; the latest of them count."""


class NgramProposer:
    """Prompt lookup: the longest n-gram of `lookup_min` to `lookup_max` tokens, and its latest place, decide."""

    def __init__(self, lookup_min: int, lookup_max: int) -> None:
        self._min = lookup_min
        self._max = lookup_max

    def source(self, pool: bytes) -> "NgramSource":
        """Return the source of a new request."""
        return NgramSource(self._min, self._max)

    def note_answer(self, pool: bytes, tokens: TokenIds) -> None:
        """Do nothing: no request reads the answers of others."""


class NgramSource:
    """The n-grams of one request."""

    def __init__(self, lookup_min: int, lookup_max: int) -> None:
        self._min = lookup_min
        self._max = lookup_max
        self._index = TokenIndex(lookup_min)

    def propose(self, tokens: TokenIds, most: int) -> Proposal:
        """Return what followed the longest n-gram; see `DraftSource.propose`."""
        best, longest = 0, self._min - 1
        ends, known = self._index.find(tokens, _MOST_ENDS), self._index.tokens
        for end in ends:
            length = common_suffix(known, known, end, self._max)
            if length > longest:
                best, longest = end, length
                if length == self._max:
                    break
        return Proposal(continuation(known, best, most), longest) if best else NOTHING


def continuation(tokens: list[int], start: int, most: int) -> list[int]:
    """Return `most` tokens from `start` on of `tokens` [n]; where these end, they go on with what was copied.

    So a text that repeats itself, with a period of any length, is continued.
    """
    copied = tokens[start : start + most]
    period = len(tokens) - start
    while len(copied) < most:
        copied.append(copied[len(copied) - period])
    return copied
