"""The order of the waiting requests: by priority, then by turns of the clients, then by each client's arrival times."""

import bisect
import heapq
import itertools
from collections import Counter

from vllm_mp.core.scheduler.request import Request, RequestKey


class FairTurns:
    """Waiting requests, of which `first` is the next to run.

    Clients with requests of the same priority take turns by the tokens that were computed for them: the client with the
    fewest is next. A client that begins to wait counts as many as the client whose turn was last. So it has its share
    from then on, but no credit for the time before. (Start-time fair queueing of Goyal et al., 1996, with tokens as the
    cost, as the virtual token counter of Sheng et al., 2024.) Requests of one client run in the order of their
    `arrival_time`, which the client gives.
    """

    def __init__(self) -> None:
        self._queues: dict[int, dict[int, _ClientQueue]] = {}
        """The requests of each priority, by client; without empty queues."""
        self._priorities: list[int] = []
        """The keys of `_queues`, sorted."""
        self._num_waiting: Counter[int] = Counter()
        """Number of requests of each client that waits."""
        self._num_requests = 0
        self._num_tokens: dict[int, int] = {}
        """Tokens that count for each client."""
        self._latest: dict[int, int] = {}
        """Number of each client's latest turn, or of the beginning of its wait; of equal clients the lowest is next."""
        self._numbers = itertools.count()
        self._num_tokens_now = 0
        """Tokens that counted for the client whose turn was last."""
        self._first: Request | None = None
        """The next request; None if it has to be found."""

    def __len__(self) -> int:
        return self._num_requests

    def requests(self) -> list[Request]:
        """Return all requests."""
        return [
            request for queues in self._queues.values() for queue in queues.values() for request in queue.requests()
        ]

    def add(self, request: Request) -> None:
        """Add a request, whose priority must not change while it waits."""
        client, priority = request.client, request.order[0]
        if not self._num_waiting[client]:
            self._num_tokens[client] = max(self._num_tokens.get(client, 0), self._num_tokens_now)
            self._latest[client] = next(self._numbers)
        self._num_waiting[client] += 1
        self._num_requests += 1
        if priority not in self._queues:
            self._queues[priority] = {}
            bisect.insort(self._priorities, priority)
        self._queues[priority].setdefault(client, _ClientQueue()).add(request)
        self._first = None

    def first(self) -> Request | None:
        """Return the next request, which stays; None if there is none."""
        if self._first is None and self._priorities:
            queues = self._queues[self._priorities[0]]
            client = min(queues, key=lambda client: (self._num_tokens[client], self._latest[client]))
            self._first = queues[client].first()
        return self._first

    def take_turn(self, request: Request, num_tokens: int) -> None:
        """Remove the request that `first` has just returned; a step computes `num_tokens` tokens of it."""
        client = request.client
        self._num_tokens_now = max(self._num_tokens_now, self._num_tokens[client])
        self._latest[client] = next(self._numbers)
        self.remove(request)
        self.count(client, num_tokens)

    def count(self, client: int, num_tokens: int) -> None:
        """Count `num_tokens` tokens that were computed for `client`."""
        self._num_tokens[client] = self._num_tokens.get(client, self._num_tokens_now) + num_tokens
        self._first = None

    def remove(self, request: Request) -> None:
        """Remove a request."""
        client, priority = request.client, request.order[0]
        queues = self._queues[priority]
        queue = queues[client]
        queue.remove(request)
        if not len(queue):
            del queues[client]
        if not queues:
            del self._queues[priority]
            del self._priorities[bisect.bisect_left(self._priorities, priority)]
        self._num_requests -= 1
        self._num_waiting[client] -= 1
        if not self._num_waiting[client]:
            del self._num_waiting[client]
        self._first = None

    def forget(self, client: int) -> None:
        """Forget the tokens of a client that has left and has no request."""
        self._num_tokens.pop(client, None)
        self._latest.pop(client, None)


_Entry = tuple[float, int, int, Request]
"""(arrival time, arrival number, number of the entry, request)"""


class _ClientQueue:
    """The requests of one client and one priority, by `arrival_time`; of equal times the first to come is first."""

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        """The entry of a removed request is void, and stays until it is the first."""
        self._entry_of: dict[RequestKey, int] = {}
        """The number of the entry of each request that is not removed."""
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._entry_of)

    def requests(self) -> list[Request]:
        return [request for *_, number, request in self._heap if self._entry_of.get(request.key) == number]

    def add(self, request: Request) -> None:
        number = self._entry_of[request.key] = next(self._numbers)
        heapq.heappush(self._heap, (request.arrival_time, request.order[1], number, request))

    def first(self) -> Request:
        while self._is_void(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][-1]

    def remove(self, request: Request) -> None:
        del self._entry_of[request.key]
        if self._heap[0][-1] is request:
            heapq.heappop(self._heap)
        # Void entries must not become the majority: they hold requests.
        elif len(self._heap) > 2 * len(self):
            self._heap = [entry for entry in self._heap if not self._is_void(entry)]
            heapq.heapify(self._heap)

    def _is_void(self, entry: _Entry) -> bool:
        *_, number, request = entry
        return self._entry_of.get(request.key) != number
