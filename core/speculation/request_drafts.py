"""What a request keeps for its drafts, from one turn of running to the next."""

from vllm_mp.core.speculation.draft_pace import RequestPace
from vllm_mp.core.speculation.proposer import DraftSource


class RequestDrafts:
    """The source of a request's drafts, and what is known of them."""

    __slots__ = ("pace", "source")

    def __init__(self, source: DraftSource | None) -> None:
        """`source` is None if a draft model proposes."""
        self.source = source
        self.pace = RequestPace()
