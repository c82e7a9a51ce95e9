"""Drafts from the request itself and from recent answers of the engine, by how often tokens followed one another.

The method is suffix decoding (Oliaro et al. 2024): the longest match of the last tokens is looked up in a pool of
answers, and the tokens that followed it most often are drafted, the more the longer the match. The paper keeps a suffix
tree. Here an index of n-grams finds the latest places of a match, and only their continuations are counted. A token of
an answer takes about 200 bytes of host memory, 50 MB for all answers.
"""

from collections import Counter, OrderedDict, deque
from typing import Final

import numpy as np

from vllm_mp.core.speculation.ngram import continuation
from vllm_mp.core.speculation.proposer import NOTHING, Proposal
from vllm_mp.core.speculation.token_index import TokenIds, TokenIndex, common_suffix, hash_of, hashes

_SIZE: Final = 3
"""Number of tokens of the n-grams in the index, and of the shortest match."""
_MOST_ENDS: Final = 8
"""Number of places that are compared, of the request and of the pool; the latest of them count."""
_MAX_POOL_TOKENS: Final = 2**18
"""Most tokens of the answers in all pools."""
_END_BITS: Final = 20
"""A place is the number of its answer, shifted by so many bits, and the end of the n-gram in it."""


class AnswerPool:
    """The latest answers of requests that may read one another's."""

    def __init__(self) -> None:
        self._answers: OrderedDict[int, list[int]] = OrderedDict()
        """By number, the oldest first."""
        self._places: dict[int, list[int]] = {}
        """By hash of an n-gram, its latest places, the oldest first."""

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, number: int, tokens: TokenIds) -> None:
        """Add the answer `tokens` [n] under `number`, which is above all others."""
        self._answers[number] = tokens.tolist()
        first = number << _END_BITS
        for end, key in enumerate(hashes(tokens, _SIZE).tolist(), _SIZE):
            places = self._places.setdefault(key, [])
            places.append(first + end)
            if len(places) > _MOST_ENDS:
                del places[0]

    def drop(self, number: int) -> None:
        """Drop an answer, the oldest."""
        for key in hashes(np.array(self._answers.pop(number), np.int32), _SIZE).tolist():
            left = [place for place in self._places.pop(key, ()) if place >> _END_BITS > number]
            if left:
                self._places[key] = left

    def find(self, tokens: list[int]) -> list[tuple[list[int], int]]:
        """Return (answer, end in it) of places of the last n-gram of `tokens` [n], the latest first."""
        if len(tokens) < _SIZE:
            return []
        key = hash_of(tokens[-_SIZE:])
        return [
            (self._answers[place >> _END_BITS], place & (1 << _END_BITS) - 1)
            for place in reversed(self._places.get(key, ()))
        ]


class SuffixProposer:
    """Suffix decoding with a pool of answers for each `pool`, none of which reads another's."""

    def __init__(self, max_depth: int, max_answers: int, factor: float, min_probability: float) -> None:
        """`max_depth` tokens of a match count, and each of them allows `factor` drafts.

        A draft must have followed at the share `min_probability` of the places of its match. `max_answers` are kept.
        """
        self._max_depth = max_depth
        self._max_answers = max_answers
        self._factor = factor
        self._min_probability = min_probability
        self._pools: dict[bytes, AnswerPool] = {}
        self._kept: deque[tuple[bytes, int, int]] = deque()
        """(pool, number, tokens) of all answers, the oldest first."""
        self._num_answers = 0
        self._num_tokens = 0

    def source(self, pool: bytes) -> "SuffixSource":
        """Return the source of a new request."""
        return SuffixSource(self, pool)

    def note_answer(self, pool: bytes, tokens: TokenIds) -> None:
        """Add the answer of a request to its pool; the oldest answers of all pools make room for it."""
        if not self._max_answers or not _SIZE <= len(tokens) <= _MAX_POOL_TOKENS:
            return
        self._num_answers += 1
        self._num_tokens += len(tokens)
        self._kept.append((pool, self._num_answers, len(tokens)))
        self._pools.setdefault(pool, AnswerPool()).add(self._num_answers, tokens)
        while len(self._kept) > self._max_answers or self._num_tokens > _MAX_POOL_TOKENS:
            oldest, number, count = self._kept.popleft()
            self._num_tokens -= count
            self._pools[oldest].drop(number)
            if not len(self._pools[oldest]):
                del self._pools[oldest]

    def propose(self, pool: bytes, own: list[int], tokens: list[int], most: int) -> Proposal:
        """Return what most often followed the longest match of `tokens` [n], at the ends `own` or in `pool`."""
        places = [(tokens, end) for end in own]
        if (answers := self._pools.get(pool)) is not None:
            places += answers.find(tokens)
        lengths = [common_suffix(tokens, text, end, self._max_depth) for text, end in places]
        longest = max(lengths, default=0)
        if longest < _SIZE:
            return NOTHING
        most = min(most, max(1, int(self._factor * longest)))
        matches = [place for place, length in zip(places, lengths, strict=True) if length == longest]
        followers = [
            continuation(text, end, most) if text is tokens else text[end : end + most] for text, end in matches
        ]
        return Proposal(self._most_frequent(followers, most), longest)

    def _most_frequent(self, followers: list[list[int]], most: int) -> list[int]:
        """Return up to `most` tokens, each of which most often comes next in those `followers` that go on like it."""
        if len(followers) == 1:
            return followers[0]
        total, drafts = len(followers), list[int]()
        while followers and len(drafts) < most:
            following = Counter(tokens[len(drafts)] for tokens in followers if len(tokens) > len(drafts))
            if not following:
                break
            token, count = following.most_common(1)[0]
            if count < self._min_probability * total:
                break
            at = len(drafts)
            followers = [tokens for tokens in followers if len(tokens) > at and tokens[at] == token]
            drafts.append(token)
        return drafts


class SuffixSource:
    """The n-grams of one request, and the pool that it reads."""

    def __init__(self, proposer: SuffixProposer, pool: bytes) -> None:
        self._proposer = proposer
        self._pool = pool
        self._index = TokenIndex(_SIZE)

    def propose(self, tokens: TokenIds, most: int) -> Proposal:
        """Return what most often followed the longest match; see `DraftSource.propose`."""
        own = self._index.find(tokens, _MOST_ENDS)
        return self._proposer.propose(self._pool, own, self._index.tokens, most)
