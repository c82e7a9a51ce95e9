"""The requests of a core: where its messages reach their streams, and the only module that ends streams."""

import time
from collections.abc import Iterable

import numpy as np

from vllm_mp import wire
from vllm_mp.client.outputs import output_path
from vllm_mp.client.outputs.completion import Completion
from vllm_mp.client.outputs.live_requests import LiveRequests
from vllm_mp.client.outputs.output_path import Entry
from vllm_mp.client.outputs.pooling_stream import PoolingStream
from vllm_mp.client.outputs.stream import Awaited, GenerationStream, RequestStream
from vllm_mp.errors import (
    ConstraintError,
    EngineError,
    EngineGenerateError,
    NoRoomError,
    NotOperatorError,
    RequestInterruptedError,
    TooManyConstraintsError,
)


class OutputProcessor:
    """Keeps the requests of one core: each completion or vector that they await by its slot.

    A completion or vector gets its slot before the core is asked for it. The slot is free again when the core has
    reported the end, which may be after the stream has ended. Until then, every message for the slot belongs to it.

    Methods that end a stream return the slots that the core must be told to abort.
    """

    def __init__(self, requests: LiveRequests | None = None) -> None:
        """`requests` are the live requests of the client, which the processors of all its cores share."""
        self.requests = LiveRequests() if requests is None else requests
        self._streams: dict[RequestStream, None] = {}
        """The live streams of this core, in the order in which the core got them."""
        self._entries: list[Entry | None] = []
        """The stream, and what it awaits, in each slot; None for a slot that is free or another core's."""
        self._num_entries = 0
        """Number of entries that are not None."""
        self._num_searched = 0
        """Number of slots whose text is searched for stop strings."""

    def __contains__(self, stream: RequestStream) -> bool:
        """Return whether `stream` is live and belongs to this core."""
        return stream in self._streams

    @property
    def num_slots_in_use(self) -> int:
        return self._num_entries

    def enter(self, stream: RequestStream) -> bool:
        """Give a slot to all that `stream` awaits. If it was aborted before, end it instead and return False.

        Raises ValueError if there are not enough slots.
        """
        if not self.requests.enter(stream):
            return False
        self.adopt(stream)
        return True

    def adopt(self, stream: RequestStream) -> None:
        """Take over a live stream, with its slots, that no core has."""
        self._streams[stream] = None
        for awaited in stream.awaited:
            if awaited.finish is None:
                self._put(stream, awaited)

    def release(self, stream: RequestStream) -> None:
        """Give up a live stream, with its slots, after the death of the core: another processor may adopt it."""
        del self._streams[stream]
        for awaited in stream.awaited:
            if self._at(awaited.slot)[1] is awaited:
                self._remove(awaited.slot)
                if awaited.finish is not None:
                    self.requests.free(awaited.slot)

    def withdraw(self, stream: RequestStream, num_sent: int) -> list[int]:
        """Undo `enter` for a stream whose first `num_sent` slots alone were sent; return these slots."""
        for awaited in stream.awaited[num_sent:]:
            self._free(awaited.slot)
        self.abort(stream.request_id)
        return [awaited.slot for awaited in stream.awaited[:num_sent]]

    def free_unsent(self, awaited: Awaited) -> None:
        """Free the slot of a completion or vector of an ended stream that the core was never asked for."""
        self._free(awaited.slot)

    def process(self, message: wire.StepOutput) -> list[int]:
        """Give the results of a step to their streams; return the slots that the core must abort.

        Raises ValueError if the columns of the message disagree.
        """
        unwanted: list[int] = []
        for logprobs in message.prompt_logprobs:
            stream, _ = self._at(logprobs.slot)
            if isinstance(stream, GenerationStream) and not stream.is_over:
                try:
                    stream.take_in_prompt_logprobs(logprobs)
                except ValueError as error:  # it concerns this request alone
                    unwanted += self.fail(stream, f"request {stream.request_id}: {error}")
        searches, now = self._num_searched > 0, time.time()
        touched, lost = output_path.current.take_in(
            self._entries, message.slots, message.tokens, message.positions, now
        )
        self.requests.wake_ups.start()
        for stream, completion in lost:
            unwanted += self._fail_for_lost_tokens(stream, completion)
        if message.logprobs:
            unwanted += self._take_in_logprobs(message.logprobs, touched)
        for slot, vector in message.vectors:
            pooling, _ = self._at(slot)
            if isinstance(pooling, PoolingStream) and not pooling.is_over:
                try:
                    pooling.vector.take_in(vector)
                except ValueError as error:
                    unwanted += self.fail(pooling, f"request {pooling.request_id}: {error}")
        for slot, count in message.cached:
            owner, awaited = self._at(slot)
            if owner is not None and awaited is not None and awaited.index == 0:
                owner.num_cached_tokens = count
        for slot, digest in message.adapters:
            _, awaited = self._at(slot)
            if isinstance(awaited, Completion):
                awaited.adapter_digest = digest
        for finish in message.finished:
            if (found := self._free(finish.slot)) is not None:
                unwanted += self._end(*found, finish)
        if searches:
            for stream, completion in touched:
                if completion.wants_stop_strings:
                    unwanted += self._end_at_stop_string(stream, completion)
        for stream, _ in touched:
            stream.wake_for_tokens(now)
        return unwanted

    def abort(self, request_id: str) -> list[int]:
        """End a live request for its consumer; return its slots, which stay in use until the core answers.

        A request whose prompt is being tokenized ends in `enter`. No-op for ids that are not live, or another core's.
        """
        stream = self.requests.find(request_id)
        if stream is None:
            self.requests.abort_early(request_id)
            return []
        if stream not in self._streams:
            return []
        slots = self._slots_of(stream)
        stream.end_all("abort")
        self._forget(stream)
        return slots

    def fail(self, stream: RequestStream, why: str) -> list[int]:
        """End a live stream with EngineGenerateError; return its slots, which stay in use until the core answers."""
        return self.fail_with(stream, EngineGenerateError(why))

    def fail_with(self, stream: RequestStream, error: EngineError) -> list[int]:
        """End a live stream with `error`; return its slots, which stay in use until the core answers."""
        slots = self._slots_of(stream)
        stream.fail(error)
        self._forget(stream)
        return slots

    def fail_all(self, error: Exception) -> None:
        """End every stream of this core with `error`, and free all slots: there is no core any more."""
        for stream in self.streams():
            stream.fail(error)
            self._forget(stream)
        for slot in range(len(self._entries)):
            self._free(slot)

    def streams(self) -> list[RequestStream]:
        """Return the live streams of this core, in the order in which the core got them."""
        return list(self._streams)

    def streams_at(self, slots: Iterable[int]) -> list[RequestStream]:
        """Return the streams in these slots, ended or not; a slot that is free has none."""
        entries = map(self._at, slots)
        return [stream for stream, _ in entries if stream is not None]

    def entries_at(self, slots: Iterable[int]) -> list[Entry]:
        """Return the streams in these slots, ended or not, and what they await there; a slot that is free has none."""
        return [entry for slot in slots if 0 <= slot < len(self._entries) and (entry := self._entries[slot])]

    def streams_in(self, message: wire.StepOutput) -> list[RequestStream]:
        """Return the streams, ended or not, of the tokens of a message; none if its columns disagree."""
        dtype = wire.slot_dtype(message.slots, len(message.tokens) // 4)
        return [] if dtype is None else self.streams_at(np.frombuffer(message.slots, dtype).tolist())

    def live(self) -> list[tuple[RequestStream, Awaited]]:
        """Return the completions and vectors that have not ended, with their streams, in the order of `streams`."""
        return [(stream, awaited) for stream in self.streams() for awaited in stream.awaited if awaited.finish is None]

    def forget_core(self) -> None:
        """Free the slots of ended requests, after the death of the core that had to report these ends."""
        kept = {awaited.slot for _, awaited in self.live()}
        for slot, entry in enumerate(self._entries):
            if entry is not None and slot not in kept:
                self._free(slot)

    def _at(self, slot: int) -> Entry | tuple[None, None]:
        """Return the stream in `slot` and what it awaits; None and None if the slot is free."""
        entry = self._entries[slot] if 0 <= slot < len(self._entries) else None
        return (None, None) if entry is None else entry

    def _put(self, stream: RequestStream, awaited: Awaited) -> None:
        """Let messages for the slot of `awaited`, which is free, reach it."""
        if awaited.slot >= len(self._entries):
            self._entries += [None] * (awaited.slot + 1 - len(self._entries))
        self._entries[awaited.slot] = stream, awaited
        self._num_entries += 1
        self._num_searched += awaited.wants_stop_strings

    def _remove(self, slot: int) -> Entry | None:
        """Remove the entry of a slot and return it; None if there is none."""
        if not 0 <= slot < len(self._entries) or (entry := self._entries[slot]) is None:
            return None
        self._entries[slot] = None
        self._num_entries -= 1
        self._num_searched -= entry[1].wants_stop_strings
        return entry

    def _free(self, slot: int) -> Entry | None:
        """Free a slot that the core does not know, or has forgotten; return its entry, or None if it has none."""
        entry = self._remove(slot)
        if entry is not None:
            self.requests.free(slot)
        return entry

    def _slots_of(self, stream: RequestStream) -> list[int]:
        """Return the slots under which the core may still be working for `stream`."""
        live = (awaited.slot for awaited in stream.awaited if awaited.finish is None)
        # A slot that the stream had before may belong to another request now.
        return [slot for slot in live if self._at(slot)[0] is stream]

    def _take_in_logprobs(
        self, messages: list[wire.TokenLogprobs], touched: list[tuple[GenerationStream, Completion]]
    ) -> list[int]:
        """Give log-probabilities to the completions that got the tokens; return the slots that the core must abort."""
        unwanted: list[int] = []
        touched_at = {completion.slot: (stream, completion) for stream, completion in touched}
        for message in messages:
            if (entry := touched_at.get(message.slot)) is not None:
                stream, completion = entry
                try:
                    if completion.logprobs is not None:
                        completion.logprobs.append(message)
                except ValueError as error:
                    unwanted += self.fail(stream, f"request {stream.request_id}: {error}")
        return unwanted

    def _end(self, stream: RequestStream, awaited: Awaited, finish: wire.Finished) -> list[int]:
        """End `awaited` as the core reports; return the slots to abort if this fails the request."""
        if stream.is_over or awaited.finish is not None:
            return []
        if finish.reason == "error":
            return self.fail_with(stream, _error_of(finish)(f"request {stream.request_id} failed: {finish.error}"))
        if finish.num_output_tokens != awaited.num_tokens:
            return self._fail_for_lost_tokens(stream, awaited)
        stream.end(awaited, finish)
        self._forget_if_over(stream)
        return []

    def _end_at_stop_string(self, stream: GenerationStream, completion: Completion) -> list[int]:
        """Read the new text of `completion`, and end it at a stop string; return its slot if the core must abort it."""
        finish = completion.finish
        completion.read()
        if completion.finish is finish:
            return []
        stream.note_end()
        self._forget_if_over(stream)
        return [completion.slot] if finish is None else []

    def _fail_for_lost_tokens(self, stream: RequestStream, awaited: Awaited) -> list[int]:
        why = f"tokens after the first {awaited.num_tokens} were lost between core and client; send the request again"
        return self.fail_with(stream, RequestInterruptedError(f"request {stream.request_id}: {why}"))

    def _forget_if_over(self, stream: RequestStream) -> None:
        if stream.is_over:
            self._forget(stream)

    def _forget(self, stream: RequestStream) -> None:
        """Forget a stream that is over; its slots may still be in use."""
        if stream in self._streams:
            del self._streams[stream]
            self.requests.forget(stream)


def _error_of(finish: wire.Finished) -> type[EngineError]:
    """Return the type of the error that ended a request."""
    if finish.needs_operator:
        return NotOperatorError
    if finish.no_room:
        return NoRoomError
    if finish.too_many_constraints:
        return TooManyConstraintsError
    if finish.interrupted:
        return RequestInterruptedError
    return ConstraintError if finish.invalid_constraint else EngineGenerateError
