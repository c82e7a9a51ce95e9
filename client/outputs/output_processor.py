"""The live requests of a client: where a core's messages reach their streams, and the only place where streams end."""

import heapq
import time
from collections.abc import Callable

from vllm_mp import wire
from vllm_mp.client.outputs import output_path
from vllm_mp.client.outputs.completion import Completion
from vllm_mp.client.outputs.output_path import Entry
from vllm_mp.client.outputs.pooling_stream import PoolingStream
from vllm_mp.client.outputs.stream import Awaited, GenerationStream, RequestStream
from vllm_mp.client.outputs.wake_ups import WakeUps
from vllm_mp.errors import (
    ConstraintError,
    DuplicateRequestIdError,
    EngineError,
    EngineGenerateError,
    NotOperatorError,
)


class OutputProcessor:
    """Keeps each live request by the caller's id, and each completion or vector that it awaits by its slot.

    A completion or vector gets its slot before the core is asked for it. The slot is free again when the core has
    reported the end, which may be after the stream has ended. Until then, every message for the slot belongs to it.

    Methods that end a stream return the slots that the core must be told to abort.
    """

    def __init__(self, on_end: Callable[[RequestStream], None] = lambda stream: None) -> None:
        """`on_end` is called with each stream that had slots and has ended, for whatever reason."""
        self._on_end = on_end
        self._by_id: dict[str, RequestStream | None] = {}
        """In the order of arrival; None while the prompt is being tokenized."""
        self._aborted_during_tokenization: set[str] = set()
        """Ids of requests that were aborted while their prompt was being tokenized."""
        self._entries: list[Entry | None] = []
        """The stream, and what it awaits, in each slot that was ever in use; None for a free slot."""
        self._free_slots: list[int] = []
        """A heap of the slots in `_entries` that are free."""
        self._num_searched = 0
        """Number of slots whose text is searched for stop strings."""
        self._wake_ups = WakeUps()

    def __len__(self) -> int:
        """Return the number of requests whose streams have not ended."""
        return len(self._by_id)

    def has_unfinished_requests(self) -> bool:
        """Return whether there is a request whose stream has not ended."""
        return bool(self._by_id)

    @property
    def num_slots_in_use(self) -> int:
        return len(self._entries) - len(self._free_slots)

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

    def enter(self, stream: RequestStream) -> bool:
        """Give a slot to all that `stream` awaits. If it was aborted before, end it instead and return False.

        Raises ValueError if there are not enough slots.
        """
        if stream.request_id in self._aborted_during_tokenization:
            self.cancel(stream.request_id)
            stream.end_all("abort")
            return False
        missing = len(stream.awaited) - len(self._free_slots)
        if len(self._entries) + missing > wire.MAX_LIVE_REQUESTS:
            raise ValueError(
                f"too many live completions: {self.num_slots_in_use}, and the limit is {wire.MAX_LIVE_REQUESTS}; wait "
                "for some to end"
            )
        for awaited in stream.awaited:
            if self._free_slots:
                awaited.slot = heapq.heappop(self._free_slots)
            else:
                awaited.slot = len(self._entries)
                self._entries.append(None)
            self._entries[awaited.slot] = stream, awaited
            self._num_searched += awaited.wants_stop_strings
        self._by_id[stream.request_id] = stream
        stream.wake_ups = self._wake_ups
        return True

    def withdraw(self, stream: RequestStream, num_sent: int) -> list[int]:
        """Undo `enter` for a stream of which only the first `num_sent` slots were sent; return these slots."""
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
        self._wake_ups.start()
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

        A request whose prompt is being tokenized ends in `enter`. No-op for ids that are not live.
        """
        if request_id not in self._by_id:
            return []
        stream = self._by_id[request_id]
        if stream is None:
            self._aborted_during_tokenization.add(request_id)
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
        """End every stream with `error`, and forget all slots: there is no core any more."""
        for stream in self.streams():
            stream.fail(error)
            self._forget(stream)
        self._entries.clear()
        self._free_slots.clear()
        self._num_searched = 0

    def ids(self) -> list[str]:
        """Return the ids of the live requests, also of those whose prompt is being tokenized."""
        return list(self._by_id)

    def streams(self) -> list[RequestStream]:
        """Return the live streams that have slots, in the order of arrival."""
        return [stream for stream in self._by_id.values() if stream is not None]

    def live(self) -> list[tuple[RequestStream, Awaited]]:
        """Return the completions and vectors that have not ended, with their streams, in the order of arrival."""
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

    def _free(self, slot: int) -> Entry | None:
        """Free a slot that the core does not know, or has forgotten; return its entry, or None if it is free."""
        if not 0 <= slot < len(self._entries) or (entry := self._entries[slot]) is None:
            return None
        self._entries[slot] = None
        self._num_searched -= entry[1].wants_stop_strings
        heapq.heappush(self._free_slots, slot)
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
        return self.fail(stream, f"request {stream.request_id}: {why}")

    def _forget_if_over(self, stream: RequestStream) -> None:
        if stream.is_over:
            self._forget(stream)

    def _forget(self, stream: RequestStream) -> None:
        """Make the id of a stream that is over available, unless another request has it already."""
        if self._by_id.get(stream.request_id) is stream:
            del self._by_id[stream.request_id]
            self._on_end(stream)


def _error_of(finish: wire.Finished) -> type[EngineError]:
    """Return the type of the error that ended a request."""
    if finish.needs_operator:
        return NotOperatorError
    return ConstraintError if finish.invalid_constraint else EngineGenerateError
