"""Draft tokens: guesses of the next tokens of a row, which one step verifies.

A step computes the last token of the row and its drafts, so that it has the logits after each of them. The sampler
chooses a token at each of these positions as it would without drafts: from the model's distribution there, with the
random number of the position. A draft is accepted while it equals the token that was chosen at its position. So the
output is the same as without drafts, token for token, for greedy, seeded and random requests alike (in floats, because
all kernels are batch-invariant). The first token that differs, or follows the last draft, is the row's new token.

Drafts never end a request: none of them is a stop token, and they leave room for the token after them.
"""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int64]

_NO_DRAFT: Final = -2
"""In the place of a draft where there is none; no token is equal to it, not even that of a row without token."""


class Drafts(NamedTuple):
    """The drafts of the rows of a step."""

    counts: Counts
    """[num_rows] number of drafts of each row, which are its last tokens in the step; 0 for rows without drafts."""
    tokens: Tokens
    """[total] the drafts of all rows, in the order of the rows."""

    def of_rows(self, is_kept: npt.NDArray[np.bool_]) -> "Drafts":
        """Return the drafts of the rows that `is_kept` [num_rows] marks."""
        return Drafts(self.counts[is_kept], self.tokens[is_kept.repeat(self.counts)])


def spread(lengths: Counts) -> Counts:
    """Return the numbers 0, 1, ... up to each of `lengths` [n], one sequence after another: [sum of lengths]."""
    offsets: Counts = np.arange(int(lengths.sum())) - (np.cumsum(lengths) - lengths).repeat(lengths)
    return offsets


def num_accepted(counts: Counts, drafts: Tokens, tokens: Tokens) -> Counts:
    """Return how many of its drafts each row accepts, [n].

    `counts` [n] and `drafts` are as in `Drafts`, of the rows that are sampled. `tokens` [n + total] are the tokens that
    were chosen: of each row one after its last known token, and one after each of its drafts. If none could be chosen
    after the last accepted draft, that draft is not accepted: another step finds out why.
    """
    lengths = counts + 1
    ends = np.cumsum(lengths)
    expected = np.full(len(tokens), _NO_DRAFT, np.int64)
    is_followed = np.ones(len(tokens), np.bool_)
    is_followed[ends - 1] = False
    expected[is_followed] = drafts
    offsets = spread(lengths)
    offsets[tokens == expected] = len(tokens)
    starts = ends - lengths
    accepted: Counts = np.minimum.reduceat(offsets, starts)
    accepted -= (tokens[starts + accepted] < 0) & (accepted > 0)
    return accepted
