"""A request in a simulated cluster."""

from vllm_mp.client.cores.router import Placement
from vllm_mp.testing.cluster.traces import TraceRequest


class Job:
    """What happens to a request: where it is, what of it is computed, and when it got its tokens."""

    __slots__ = (
        "core",
        "ended_s",
        "finish",
        "first_token_s",
        "front",
        "held",
        "hit",
        "moved_s",
        "num_computed",
        "num_counted",
        "num_generated",
        "num_lost",
        "num_private",
        "number",
        "pauses",
        "placement",
        "request",
        "was_read",
    )

    def __init__(self, number: int, request: TraceRequest, front: int) -> None:
        self.number = number
        self.request = request
        self.front = front
        """The front that routes the request."""
        self.core = -1
        self.num_generated = 0
        """Tokens that the client has; of a decode, as of its admission to the decodes of its core."""
        self.num_computed = 0
        """Tokens in the cache of its core, while it is read."""
        self.finish = -1
        """The number of decode steps of its core with which it ends; -1 while it does not decode."""
        self.held: list[int] = []
        """Cached blocks that it uses."""
        self.num_private = 0
        """Tokens for which it takes room in the cache beside `held`."""
        self.hit: int | None = None
        """Tokens of its prompt that the first core had cached when it began to read it."""
        self.num_counted = 0
        """Tokens that the counts of its core include as unread."""
        self.num_lost = 0
        """Computed tokens that died with a core, and that no other core has looked up yet."""
        self.first_token_s = -1.0
        self.ended_s = -1.0
        self.moved_s: float | None = None
        """When its core died; None once it got a token after that."""
        self.pauses: list[float] = []
        """Seconds from the death of a core to the next token."""
        self.placement: Placement | None = None
        self.was_read = False
        """The core to which it was sent last has made a token of it."""

    @property
    def num_known(self) -> int:
        """Tokens that a core must have read before it makes the next one."""
        return self.request.num_prompt + self.num_generated
