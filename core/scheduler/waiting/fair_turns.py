"""The order of the waiting requests: by priority, then by turns, then by the arrival times of each client."""

import bisect
import heapq
import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Generic, TypeVar

from vllm_mp.core.scheduler.request import Line, Request, RequestKey

_Party = TypeVar("_Party", Line, str)


class FairTurns:
    """Waiting requests; `first` is the next to run.

    The owners of requests of the same priority take turns, however many clients each has. Within the turns of an owner,
    the lines of its clients take turns. Requests of one line run in the order of their `arrival_time`, which the client
    gives.
    """

    def __init__(self) -> None:
        self._queues: dict[int, dict[str, dict[Line, _LineQueue]]] = {}
        """The requests of each priority, by owner and line; without empty queues."""
        self._priorities: list[int] = []
        """The keys of `_queues`, sorted."""
        self._owners = _Turns[str]()
        self._lines: dict[str, _Turns[Line]] = {}
        """The turns within those of each owner."""
        self._lines_of: dict[int, set[tuple[str, Line]]] = {}
        """By client: its lines, each with its owner."""
        self._num_requests = 0
        self._first: Request | None = None
        """The next request; None if it has to be found."""

    def __len__(self) -> int:
        return self._num_requests

    def requests(self) -> list[Request]:
        """Return all requests."""
        return [
            request
            for owners in self._queues.values()
            for lines in owners.values()
            for queue in lines.values()
            for request in queue.requests()
        ]

    def add(self, request: Request) -> None:
        """Add a request, whose priority must not change while it waits."""
        owner, priority = request.owner, request.order[0]
        self._turns_in(request).begin_wait(request.line)
        self._owners.begin_wait(owner)
        self._num_requests += 1
        if priority not in self._queues:
            self._queues[priority] = {}
            bisect.insort(self._priorities, priority)
        self._queues[priority].setdefault(owner, {}).setdefault(request.line, _LineQueue()).add(request)
        self._first = None

    def first(self) -> Request | None:
        """Return the next request, which stays; None if there is none."""
        if self._first is None and self._priorities:
            owners = self._queues[self._priorities[0]]
            owner = self._owners.next(owners)
            self._first = owners[owner][self._lines[owner].next(owners[owner])].first()
        return self._first

    def take_turn(self, request: Request, num_tokens: int) -> None:
        """Remove the request that `first` has just returned; a step computes `num_tokens` tokens of it."""
        self._owners.take(request.owner)
        self._lines[request.owner].take(request.line)
        self.remove(request)
        self.count(request, num_tokens)

    def count(self, request: Request, num_tokens: int) -> None:
        """Count `num_tokens` tokens of a request that were computed."""
        self._owners.count(request.owner, num_tokens)
        self._turns_in(request).count(request.line, num_tokens)
        self._first = None

    def remove(self, request: Request) -> None:
        """Remove a request."""
        owner, line, priority = request.owner, request.line, request.order[0]
        owners = self._queues[priority]
        queue = owners[owner][line]
        queue.remove(request)
        if not len(queue):
            del owners[owner][line]
        if not owners[owner]:
            del owners[owner]
        if not owners:
            del self._queues[priority]
            del self._priorities[bisect.bisect_left(self._priorities, priority)]
        self._num_requests -= 1
        self._owners.end_wait(owner)
        self._lines[owner].end_wait(line)
        self._first = None

    def forget(self, client: int) -> None:
        """Forget the tokens of a client that has left and has no request."""
        for owner, line in self._lines_of.pop(client, ()):
            self._lines[owner].forget(line)
            if not len(self._lines[owner]):
                del self._lines[owner]
                self._owners.forget(owner)

    def _turns_in(self, request: Request) -> "_Turns[Line]":
        """Return the turns within those of the owner of a request."""
        self._lines_of.setdefault(request.client, set()).add((request.owner, request.line))
        return self._lines.setdefault(request.owner, _Turns[Line]())


class _Turns(Generic[_Party]):
    """Parties that take turns by the tokens that were computed for them: the party with the fewest is next.

    A party that begins to wait counts as many as the party whose turn was last. So it has its share from then on, but
    no credit for the time before. (Start-time fair queueing of Goyal et al., 1996, with tokens as the cost, as the
    virtual token counter of Sheng et al., 2024.)
    """

    def __init__(self) -> None:
        self._num_waiting: Counter[_Party] = Counter()
        """Number of requests of each party that waits."""
        self._num_tokens: dict[_Party, int] = {}
        """Tokens that count for each party."""
        self._latest: dict[_Party, int] = {}
        """Number of the latest turn, or of the beginning of the wait; of equal parties the lowest is next."""
        self._numbers = itertools.count()
        self._num_tokens_now = 0
        """Tokens that counted for the party whose turn was last."""

    def __len__(self) -> int:
        """Return the number of parties that are not forgotten."""
        return len(self._num_tokens)

    def begin_wait(self, party: _Party) -> None:
        """Note one more request that waits."""
        if not self._num_waiting[party]:
            self._num_tokens[party] = max(self._num_tokens.get(party, 0), self._num_tokens_now)
            self._latest[party] = next(self._numbers)
        self._num_waiting[party] += 1

    def end_wait(self, party: _Party) -> None:
        """Note that a request waits no longer."""
        self._num_waiting[party] -= 1
        if not self._num_waiting[party]:
            del self._num_waiting[party]

    def next(self, parties: Iterable[_Party]) -> _Party:
        """Return the next of `parties`, all of which wait."""
        return min(parties, key=lambda party: (self._num_tokens[party], self._latest[party]))

    def take(self, party: _Party) -> None:
        """Note the turn of a party that waits."""
        self._num_tokens_now = max(self._num_tokens_now, self._num_tokens[party])
        self._latest[party] = next(self._numbers)

    def count(self, party: _Party, num_tokens: int) -> None:
        """Count tokens that were computed for a party."""
        self._num_tokens[party] = self._num_tokens.get(party, self._num_tokens_now) + num_tokens

    def forget(self, party: _Party) -> None:
        """Forget the tokens of a party that does not wait."""
        self._num_tokens.pop(party, None)
        self._latest.pop(party, None)


_Entry = tuple[float, int, int, Request]
"""(arrival time, arrival number, number of the entry, request)"""


class _LineQueue:
    """The requests of one line and one priority, by `arrival_time`; of equal times the first to come is first."""

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
