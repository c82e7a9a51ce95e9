"""The requests that wait for a row of the batch."""

import heapq
import time

from vllm_mp.core.scheduler.isolated_groups import IsolatedGroups
from vllm_mp.core.scheduler.request import Request, RequestKey


class WaitingQueue:
    """Orders the waiting requests, and holds back requests that arrive during a pause.

    Held requests are not in the queue: `first` finds none of them before `release`. Nor does it find suspects, which
    wait in `isolated`.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []
        """(order, request). An aborted request stays until its entry is the first."""
        self._num_queued = 0
        """Number of entries, without aborted requests."""
        self.isolated = IsolatedGroups()
        self._held: dict[RequestKey, Request] = {}
        self.is_holding = False
        """True: requests that arrive are held back."""

    def __len__(self) -> int:
        """Return the number of waiting requests, suspects included, without held requests."""
        return self._num_queued + len(self.isolated)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def add(self, request: Request, is_new: bool = True) -> None:
        """Queue a request, or hold it back if it is new and arrives during a pause."""
        if is_new and not request.queued_at:
            request.queued_at = time.monotonic()
        if is_new and self.is_holding:
            self._held[request.key] = request
            return
        if request.isolate_until_num_tokens:
            self.isolated.add(request)
            return
        heapq.heappush(self._heap, (request.order, request))
        self._num_queued += 1

    def first(self) -> Request | None:
        """Return the next request that is no suspect, which stays in the queue; None if there is none."""
        while self._heap and self._heap[0][1].aborted:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self, request: Request) -> None:
        """Remove the request that `first`, of the queue or of `isolated`, has just returned."""
        if request.isolate_until_num_tokens:
            self.isolated.remove(request)
        else:
            heapq.heappop(self._heap)
            self._num_queued -= 1
        if request.queue_seconds is None:
            request.queue_seconds = time.monotonic() - request.queued_at

    def remove(self, request: Request) -> None:
        """Remove a request that is queued or held back."""
        if self._held.pop(request.key, None) is not None:
            return
        if request.isolate_until_num_tokens:
            self.isolated.remove(request)
            return
        request.aborted = True
        self._num_queued -= 1
        # The void entry stays until it is the first. Void entries must not become the majority: they hold requests.
        if len(self._heap) > 2 * self._num_queued:
            self._heap = [entry for entry in self._heap if not entry[1].aborted]
            heapq.heapify(self._heap)

    def hold(self) -> None:
        """Hold back requests that arrive from now on."""
        self.is_holding = True

    def release(self) -> None:
        """Queue all held requests, and from now on requests that arrive."""
        self.is_holding = False
        for request in self._held.values():
            self.add(request)
        self._held.clear()
