"""The live requests of a client over all its cores: their ids, and the numbers of the slots that they use."""

import heapq
from collections.abc import Callable

from vllm_mp import wire
from vllm_mp.client.outputs.stream import RequestStream
from vllm_mp.client.outputs.wake_ups import WakeUps
from vllm_mp.errors import DuplicateRequestIdError


class LiveRequests:
    """Keeps each live request by the caller's id, and gives out the numbers of slots.

    A number is in use by at most one core at a time, so that a request keeps its slots when it moves to another core.
    The `OutputProcessor` of each core decides which requests end.
    """

    def __init__(self, on_end: Callable[[RequestStream], None] = lambda stream: None) -> None:
        """`on_end` is called with each stream that had slots and has ended, for whatever reason."""
        self.on_end = on_end
        self.wake_ups = WakeUps()
        """Wakes the consumers of all streams, in slices."""
        self._by_id: dict[str, RequestStream | None] = {}
        """In the order of arrival; None while the prompt is being tokenized."""
        self._aborted_during_tokenization: set[str] = set()
        """Ids of requests that were aborted while their prompt was being tokenized."""
        self._num_slots = 0
        """Number of slots that were ever in use."""
        self._free_slots: list[int] = []
        """A heap of those slots that are free."""

    def __len__(self) -> int:
        """Return the number of requests whose streams have not ended."""
        return len(self._by_id)

    def has_unfinished_requests(self) -> bool:
        """Return whether there is a request whose stream has not ended."""
        return bool(self._by_id)

    @property
    def num_slots_in_use(self) -> int:
        return self._num_slots - len(self._free_slots)

    def reserve(self, request_id: str) -> None:
        """Reserve an id for a request whose prompt must be tokenized.

        Raises DuplicateRequestIdError if a live request has the id.
        """
        if request_id in self._by_id:
            raise DuplicateRequestIdError(f"request_id {request_id!r} is in use by a live request; choose another")
        self._by_id[request_id] = None

    def cancel(self, request_id: str) -> None:
        """Undo `reserve`."""
        self._by_id.pop(request_id, None)
        self._aborted_during_tokenization.discard(request_id)

    def ids(self) -> list[str]:
        """Return the ids of the live requests, also of those whose prompt is being tokenized."""
        return list(self._by_id)

    def streams(self) -> list[RequestStream]:
        """Return the live streams that have slots, in the order of arrival."""
        return [stream for stream in self._by_id.values() if stream is not None]

    def find(self, request_id: str) -> RequestStream | None:
        """Return the live stream with this id; None if there is none, or if its prompt is being tokenized."""
        return self._by_id.get(request_id)

    def abort_early(self, request_id: str) -> None:
        """Mark a request whose prompt is being tokenized, so that it is never sent; no-op for other ids."""
        if request_id in self._by_id and self._by_id[request_id] is None:
            self._aborted_during_tokenization.add(request_id)

    def enter(self, stream: RequestStream) -> bool:
        """Give a slot to all that `stream` awaits. If it was aborted before, end it instead and return False.

        Raises ValueError if there are not enough slots.
        """
        if stream.request_id in self._aborted_during_tokenization:
            self.cancel(stream.request_id)
            stream.end_all("abort")
            return False
        missing = len(stream.awaited) - len(self._free_slots)
        if self._num_slots + missing > wire.MAX_LIVE_REQUESTS:
            raise ValueError(
                f"too many live completions: {self.num_slots_in_use}, and the limit is {wire.MAX_LIVE_REQUESTS}; wait "
                "for some to end"
            )
        for awaited in stream.awaited:
            if self._free_slots:
                awaited.slot = heapq.heappop(self._free_slots)
            else:
                awaited.slot = self._num_slots
                self._num_slots += 1
        self._by_id[stream.request_id] = stream
        stream.wake_ups = self.wake_ups
        return True

    def free(self, slot: int) -> None:
        """Make a slot that no core uses any more available."""
        heapq.heappush(self._free_slots, slot)

    def forget(self, stream: RequestStream) -> None:
        """Make the id of a stream that is over available, unless another request has it already."""
        if self._by_id.get(stream.request_id) is stream:
            del self._by_id[stream.request_id]
            self.on_end(stream)
