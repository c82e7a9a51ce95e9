"""The live requests of a client, by the caller's id and by the slot that names them on the wire."""

import heapq
import logging
import time

from vllm_mp import wire
from vllm_mp.client.pooling_stream import PoolingStream
from vllm_mp.client.request_stream import RequestStream
from vllm_mp.errors import EngineGenerateError

logger = logging.getLogger(__name__)


class RequestBook:
    """Who is waiting for what.

    A slot is taken when a request is sent to the core and is free again when the core has said that the request has
    ended, which may be after its stream has. Until then whatever still comes for the slot belongs to that request.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, RequestStream | None] = {}
        """None while the prompt is being tokenized."""
        self._aborted_early: set[str] = set()
        """Of those, the ones that have been aborted meanwhile."""
        self._by_slot: dict[int, RequestStream] = {}
        self._free_slots: list[int] = []
        self._num_slots = 0

    def __len__(self) -> int:
        """Requests whose streams have not ended."""
        return len(self._by_id)

    @property
    def num_slots_in_use(self) -> int:
        return len(self._by_slot)

    def reserve(self, request_id: str) -> None:
        """Note that a request is about to be admitted; raises ValueError if there is a live one of that id."""
        if request_id in self._by_id:
            raise ValueError(f"request_id {request_id!r} is in use by a live request; choose another")
        self._by_id[request_id] = None

    def cancel(self, request_id: str) -> None:
        """Undo `reserve`."""
        self._by_id.pop(request_id, None)
        self._aborted_early.discard(request_id)

    def abort_early(self, request_id: str) -> None:
        """Note that a reserved request shall not be sent; of other ids, nothing."""
        if self._by_id.get(request_id, ...) is None:
            self._aborted_early.add(request_id)

    def was_aborted_early(self, request_id: str) -> bool:
        return request_id in self._aborted_early

    def find(self, request_id: str) -> RequestStream | None:
        """The live stream of that id, if its request has been sent."""
        return self._by_id.get(request_id)

    def take_slot(self) -> int:
        """A slot for a request that is about to be sent; raises ValueError when there are none."""
        if self._free_slots:
            return heapq.heappop(self._free_slots)
        if self._num_slots == wire.MAX_LIVE_REQUESTS:
            raise ValueError(f"{self._num_slots} requests are live, which is the most; wait for some to finish")
        self._num_slots += 1
        return self._num_slots - 1

    def give_back(self, slot: int) -> None:
        """Free a slot that the core knows nothing of, or nothing any more."""
        heapq.heappush(self._free_slots, slot)

    def enter(self, stream: RequestStream, slot: int) -> None:
        """The request has been sent."""
        stream.slot = slot
        self._by_id[stream.request_id] = self._by_slot[slot] = stream

    def take_in(self, message: wire.StepOutput) -> list[int]:
        """Give the streams what a step brought them; returns slots whose requests the core must abort.

        Raises ValueError for a message whose columns disagree.
        """
        streams = self._by_slot
        touched: dict[int, RequestStream] = {}
        lost = []
        for slot, token, position in zip(*wire.unpack_tokens(message), strict=True):
            stream = streams.get(slot)
            if stream is None or stream.is_over:
                continue
            if stream.take_in(token, position):
                touched[slot] = stream
            else:
                self._lose(stream)
                lost.append(slot)
        for slot, vector in message.vectors:
            stream = streams.get(slot)
            if isinstance(stream, PoolingStream):
                stream.take_in_vector(vector)
        for slot, count in message.cached:
            if (stream := streams.get(slot)) is not None:
                stream.num_cached_tokens = count
        for finish in message.finished:
            stream = streams.pop(finish.slot, None)
            if stream is not None:
                self.give_back(finish.slot)
                self._end(stream, finish)
        now = time.time()
        for stream in touched.values():
            stream.wake_for_tokens(now)
        return lost

    def end_by_abort(self, stream: RequestStream) -> None:
        """End a live stream for its consumer; its slot stays taken until the core answers."""
        stream.end(wire.Finished(stream.slot, len(stream.token_ids), "abort"))
        self._by_id.pop(stream.request_id, None)

    def fail_all(self, error: Exception) -> None:
        """End every stream with `error`."""
        for stream in self._by_slot.values():
            stream.fail(error)
            self._by_id.pop(stream.request_id, None)
        self._by_slot.clear()

    def _end(self, stream: RequestStream, finish: wire.Finished) -> None:
        if stream.is_over:
            return
        if finish.reason == "error":
            stream.fail(EngineGenerateError(f"request {stream.request_id} failed: {finish.error}"))
        elif finish.num_output != len(stream.token_ids):
            self._lose(stream)
        else:
            stream.end(finish)
        self._by_id.pop(stream.request_id, None)

    def _lose(self, stream: RequestStream) -> None:
        """Fail a stream of which tokens are missing."""
        stream.fail(
            EngineGenerateError(
                f"request {stream.request_id}: tokens after the first {len(stream.token_ids)} were lost on the way"
            )
        )
        self._by_id.pop(stream.request_id, None)
