"""The live requests of a client, by the caller's id and by the slots that name their answers on the wire."""

import heapq
import logging
import time

from vllm_mp import wire
from vllm_mp.client.outputs.completion import Completion
from vllm_mp.client.outputs.pooling_stream import PoolingStream
from vllm_mp.client.outputs.stream import RequestStream
from vllm_mp.errors import EngineGenerateError

logger = logging.getLogger(__name__)


class OutputProcessor:
    """Who is waiting for what.

    A slot is taken when an answer is asked of the core and is free again when the core has said that it has ended,
    which may be after its stream has. Until then whatever still comes for the slot belongs to that answer.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, RequestStream | None] = {}
        """None while the prompt is being tokenized."""
        self._aborted_early: set[str] = set()
        """Of those, the ones that have been aborted meanwhile."""
        self._by_slot: dict[int, tuple[RequestStream, Completion]] = {}
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

    def enter(self, stream: RequestStream) -> None:
        """Give each answer of `stream` a slot; raises ValueError when there are not enough."""
        missing = len(stream.answers) - len(self._free_slots)
        if self._num_slots + missing > wire.MAX_LIVE_REQUESTS:
            raise ValueError(f"{len(self._by_slot)} answers are being written, which is the most; wait for some to end")
        for answer in stream.answers:
            if self._free_slots:
                answer.slot = heapq.heappop(self._free_slots)
            else:
                answer.slot = self._num_slots
                self._num_slots += 1
            self._by_slot[answer.slot] = stream, answer
        self._by_id[stream.request_id] = stream

    def withdraw(self, stream: RequestStream, num_sent: int) -> list[int]:
        """Undo `enter` for a stream of which only the first `num_sent` answers were sent; returns their slots."""
        for answer in stream.answers[num_sent:]:
            self._free(answer.slot)
        self.end_by_abort(stream)
        return [answer.slot for answer in stream.answers[:num_sent]]

    def take_in(self, message: wire.StepOutput) -> list[int]:
        """Give the streams what a step brought them; returns slots whose answers the core must abort.

        Raises ValueError for a message whose parts disagree.
        """
        entries = self._by_slot
        touched: dict[int, tuple[RequestStream, Completion]] = {}
        unwanted: list[int] = []
        for own in message.prompt_logprobs:
            if (entry := entries.get(own.slot)) is not None and not entry[0].is_over:
                try:
                    entry[0].take_in_prompt_logprobs(own)
                except ValueError as error:  # of this request; the rest of the message is others' answers
                    unwanted += self.fail(entry[0], f"request {entry[0].request_id}: {error}")
        for slot, token, position in zip(*wire.unpack_tokens(message), strict=True):
            entry = entries.get(slot)
            if entry is None or entry[1].finish is not None or entry[0].is_over:
                continue
            if entry[1].take_in(token, position):
                touched[slot] = entry
            else:
                unwanted += self._lose(*entry)
        for own in message.logprobs:
            if (entry := touched.get(own.slot)) is not None:
                try:
                    entry[1].take_in_logprobs(own)
                except ValueError as error:
                    unwanted += self.fail(entry[0], f"request {entry[0].request_id}: {error}")
        for slot, vector in message.vectors:
            if slot in entries and isinstance(stream := entries[slot][0], PoolingStream):
                try:
                    stream.take_in_vector(vector)
                except ValueError as error:
                    unwanted += self.fail(stream, f"request {stream.request_id}: {error}")
        for slot, count in message.cached:
            if slot in entries and entries[slot][1].index == 0:
                entries[slot][0].num_cached_tokens = count
        for finish in message.finished:
            entry = self._free(finish.slot)
            if entry is not None:
                unwanted += self._end(*entry, finish)
        now = time.time()
        for stream, answer in touched.values():
            if answer.wants_stop_strings:
                unwanted += self._look_for_stop(stream, answer)
            stream.wake_for_tokens(now)
        return unwanted

    def end_by_abort(self, stream: RequestStream) -> list[int]:
        """End a live stream for its consumer; returns its slots, which stay taken until the core answers."""
        slots = self._slots_of(stream)
        stream.end_all("abort")
        self._forget(stream)
        return slots

    def fail(self, stream: RequestStream, why: str) -> list[int]:
        """End a live stream with EngineGenerateError; returns its slots, as `end_by_abort` does."""
        slots = self._slots_of(stream)
        stream.fail(EngineGenerateError(why))
        self._forget(stream)
        return slots

    def live(self) -> list[tuple[RequestStream, Completion]]:
        """The answers that still have to come, in the order in which their requests arrived."""
        streams = [stream for stream in self._by_id.values() if stream is not None]
        return [(stream, answer) for stream in streams for answer in stream.answers if answer.finish is None]

    def forget_core(self) -> None:
        """Free the slots that were kept for a core, which is gone, to say that their answers have ended."""
        kept = {answer.slot for _, answer in self.live()}
        for slot in [slot for slot in self._by_slot if slot not in kept]:
            self._free(slot)

    def fail_all(self, error: Exception) -> None:
        """End every stream with `error`."""
        for stream, _ in self._by_slot.values():
            stream.fail(error)
            self._forget(stream)
        self._by_slot.clear()

    def _free(self, slot: int) -> tuple[RequestStream, Completion] | None:
        """End the use of a slot that the core knows nothing of, or nothing any more."""
        entry = self._by_slot.pop(slot, None)
        if entry is not None:
            heapq.heappush(self._free_slots, slot)
        return entry

    def _slots_of(self, stream: RequestStream) -> list[int]:
        """The slots under which the core may still be writing answers to `stream`."""
        live = (answer.slot for answer in stream.answers if answer.finish is None)
        # A slot that one of its answers had may be another request's by now.
        return [slot for slot in live if slot in self._by_slot and self._by_slot[slot][0] is stream]

    def _end(self, stream: RequestStream, answer: Completion, finish: wire.Finished) -> list[int]:
        if stream.is_over or answer.finish is not None:
            return []
        if finish.reason == "error":
            return self.fail(stream, f"request {stream.request_id} failed: {finish.error}")
        if finish.num_output_tokens != len(answer.token_ids):
            return self._lose(stream, answer)
        stream.end(answer, finish)
        self._forget_if_over(stream)
        return []

    def _look_for_stop(self, stream: RequestStream, answer: Completion) -> list[int]:
        finish = answer.finish
        answer.read()
        if answer.finish is finish:
            return []
        stream.note_end()
        self._forget_if_over(stream)
        return [answer.slot] if finish is None else []

    def _lose(self, stream: RequestStream, answer: Completion) -> list[int]:
        """Fail a stream of which tokens are missing."""
        return self.fail(
            stream,
            f"request {stream.request_id}: tokens after the first {len(answer.token_ids)} were lost on the way",
        )

    def _forget_if_over(self, stream: RequestStream) -> None:
        if stream.is_over:
            self._forget(stream)

    def _forget(self, stream: RequestStream) -> None:
        """Let the id of `stream`, which is over, be used again, unless it is already."""
        if self._by_id.get(stream.request_id) is stream:
            del self._by_id[stream.request_id]
