"""What a method of drafting does: it proposes tokens that may follow those of a request.

The method `draft_model` has no `Proposer`: its model proposes for many rows at a time (`core/worker/draft_runner.py`).
"""

from typing import NamedTuple, Protocol

from vllm_mp.core.speculation.token_index import TokenIds


class Proposal(NamedTuple):
    """Tokens that may come next."""

    tokens: list[int]
    match: int
    """How many of the last tokens were found elsewhere, where the proposed tokens followed them."""


NOTHING = Proposal([], 0)


class DraftSource(Protocol):
    """Where the drafts of one request come from."""

    def propose(self, tokens: TokenIds, most: int) -> Proposal:
        """Return up to `most` tokens that may follow `tokens` [n], which begin with those of the call before."""
        ...


class Proposer(Protocol):
    """A method of drafting, with what it keeps for all requests."""

    def source(self, pool: bytes) -> DraftSource:
        """Return the source of a new request; those with the same `pool` may read one another's answers."""
        ...

    def note_answer(self, pool: bytes, tokens: TokenIds) -> None:
        """Take in the output `tokens` [n] of a request that has ended."""
        ...
