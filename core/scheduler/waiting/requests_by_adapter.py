"""Requests that have adapters and wait for the same thing, by adapter."""

from collections import Counter

from vllm_mp.core.lora.cached_adapter import CachedAdapter
from vllm_mp.core.scheduler.request import Request, RequestKey


class RequestsByAdapter:
    """The requests of each adapter, in the order in which they were added, and their priorities."""

    def __init__(self) -> None:
        self._queues: dict[CachedAdapter, _Queue] = {}
        """No queue is empty."""
        self._num_requests = 0

    def __len__(self) -> int:
        """Return the number of requests of all adapters."""
        return self._num_requests

    def __contains__(self, request: Request) -> bool:
        queue = None if request.adapter is None else self._queues.get(request.adapter)
        return queue is not None and request.key in queue.requests

    def all(self) -> list[Request]:
        """Return the requests of all adapters."""
        return [request for queue in self._queues.values() for request in queue.requests.values()]

    def of(self, adapter: CachedAdapter) -> list[Request]:
        """Return the requests of `adapter`."""
        queue = self._queues.get(adapter)
        return [] if queue is None else list(queue.requests.values())

    def best_priority(self, adapter: CachedAdapter) -> int | None:
        """Return the lowest priority number of the requests of `adapter`; None if it has none."""
        queue = self._queues.get(adapter)
        return None if queue is None else min(queue.priorities)

    def add(self, adapter: CachedAdapter, request: Request) -> None:
        """Add a request of `adapter` that is not here."""
        queue = self._queues.setdefault(adapter, _Queue())
        queue.requests[request.key] = request
        queue.priorities[request.order[0]] += 1
        self._num_requests += 1

    def remove(self, adapter: CachedAdapter, request: Request) -> None:
        """Remove a request of `adapter` that is here."""
        queue = self._queues[adapter]
        del queue.requests[request.key]
        queue.priorities[request.order[0]] -= 1
        if not queue.priorities[request.order[0]]:
            del queue.priorities[request.order[0]]
        if not queue.requests:
            del self._queues[adapter]
        self._num_requests -= 1


class _Queue:
    """The requests of one adapter, with the number of requests of each priority."""

    def __init__(self) -> None:
        self.requests: dict[RequestKey, Request] = {}
        self.priorities: Counter[int] = Counter()
