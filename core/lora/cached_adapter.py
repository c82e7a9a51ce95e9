"""An adapter as the core keeps it."""

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_mp.core.lora.adapter import Adapter
    from vllm_mp.core.scheduler.request import Request, RequestKey

NO_SLOT = -1


class AdapterQueue:
    """Requests of one adapter that wait, with the number of requests of each priority."""

    def __init__(self) -> None:
        self._requests: dict[RequestKey, Request] = {}
        self._priorities: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, key: "RequestKey") -> bool:
        return key in self._requests

    def requests(self) -> "list[Request]":
        """Return all requests, in the order in which they were added."""
        return list(self._requests.values())

    @property
    def best_priority(self) -> int:
        """The lowest priority number; 0 if the queue is empty."""
        return min(self._priorities, default=0)

    def add(self, request: "Request") -> None:
        """Add a request that is not here."""
        self._requests[request.key] = request
        self._priorities[request.order[0]] += 1

    def remove(self, request: "Request") -> None:
        """Remove a request that is here."""
        del self._requests[request.key]
        self._priorities[request.order[0]] -= 1
        if not self._priorities[request.order[0]]:
            del self._priorities[request.order[0]]


@dataclass(slots=True, eq=False)
class CachedAdapter:
    """The weights of an adapter, and who uses them. Other weights under the same id are another `CachedAdapter`."""

    id: int
    name: str
    path: str
    """The folder that holds the weights."""
    number: int
    """Distinguishes these weights from all others that the core has had; the key of the prefix cache. At least 1."""
    digest: str = ""
    """The digest of the weights, which must be the same whenever they are loaded; empty before the first load."""
    weights: "Adapter | None" = None
    """The weights in host memory."""
    slot: int = NO_SLOT
    """The adapter slot on the device that holds the weights; `NO_SLOT` if none does."""
    is_added: bool = False
    """A call of `add_lora` has named the adapter, so that it is known until it is removed."""
    is_pinned: bool = False
    """Neither the host memory nor the slot is taken away."""
    is_current: bool = True
    """False: the adapter was removed, or other weights replaced it; its requests run to their ends."""
    is_selected: bool = False
    """It is one of the next adapters that get a slot, so that its host memory is not taken away."""
    is_closing: bool = False
    """Its slot is given to another adapter when no running request uses it; requests that wait stay parked."""
    num_rows: int = 0
    """Number of running requests that use it."""
    num_admitted: int = 0
    """Number of its requests that began to run since another adapter was ready for its slot."""
    given_at: int = 0
    """When this adapter got its slot, on a clock that counts uses of slots."""
    used_at: int = 0
    """When a request with this adapter last began to run, on the same clock."""
    requests: "dict[RequestKey, Request]" = field(default_factory=dict)
    """All live requests that use it."""
    waiting: AdapterQueue = field(default_factory=AdapterQueue)
    """Its requests that wait for a row, while it has a slot."""
    parked: AdapterQueue = field(default_factory=AdapterQueue)
    """Its requests that wait until it gets a slot."""

    def __str__(self) -> str:
        return f"adapter {self.name!r} (id {self.id})"

    @property
    def is_at_hand(self) -> bool:
        """Whether the weights are in host memory or in a slot, so that no file has to be read."""
        return self.weights is not None or self.slot != NO_SLOT

    @property
    def is_idle(self) -> bool:
        """Whether no request runs or waits in its slot."""
        return not self.num_rows and not len(self.waiting)
