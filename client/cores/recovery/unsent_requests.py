"""The requests of a client that its core has not been sent, although there is a core.

A replay waits for room in the core, and new requests are held back for its sake (`waiting_replays.py`). Any request is
held back while a group of suspects is tested, if it is unknown which requests were in the step of the death
(`suspects.py`).
"""

import weakref
from collections.abc import Callable, Collection, Mapping

import msgspec

from vllm_mp import wire
from vllm_mp.client.cores.recovery.suspects import Entry, Suspects
from vllm_mp.client.cores.recovery.waiting_replays import ALL_TENANTS, WaitingReplays
from vllm_mp.client.outputs.output_processor import OutputProcessor
from vllm_mp.client.outputs.stream import Awaited, RequestStream


class UnsentRequests:
    """What the core of a client must be asked for later. Each entry has its slot, which the core does not know."""

    def __init__(
        self, requests: OutputProcessor, suspects: Suspects, send_replays: "weakref.WeakMethod[Callable[[], None]]"
    ) -> None:
        """`requests` and `suspects` are those of the core; `send_replays` sends what `replays.take` yields."""
        self._requests = requests
        self._suspects = suspects
        self._held_back: list[Entry] = []
        """In the order in which they were made."""
        self.replays = WaitingReplays(send_replays)

    def slots(self) -> set[int]:
        """Return the slots of all unsent requests."""
        return self.replays.slots() | {awaited.slot for _, awaited in self._held_back}

    def must_wait(self, stream: RequestStream, awaited: Awaited) -> bool:
        """Return whether a request must be held back now."""
        return self._must_wait((stream, awaited), self.replays.refused_priorities())

    def hold_back(self, stream: RequestStream, awaited: Awaited) -> None:
        """Keep a request until `release` returns it."""
        self._held_back.append((stream, awaited))

    def release(self) -> list[Entry]:
        """Return the requests that may be sent now, which are held back no longer.

        These are the next group of suspects once the last is cleared, and new requests once the core has room.
        """
        if not self._held_back:
            return []
        self._suspects.choose_sent_group(self._requests.live())
        entries, priorities = self._held_back, self.replays.refused_priorities()
        self._held_back = [entry for entry in entries if self._must_wait(entry, priorities)]
        held_back = {awaited for _, awaited in self._held_back}
        return [entry for entry in entries if entry[1] not in held_back]

    def without_refused_replays(self, message: wire.StepOutput) -> wire.StepOutput:
        """Let replays wait that the core has no room for; return `message` without these ends."""
        refused = {
            awaited.slot: (stream, awaited)
            for stream, awaited in self._requests.entries_at([end.slot for end in message.finished if end.no_room])
            if stream.is_replay and not stream.is_over and awaited.finish is None
        }
        if not refused:
            return message
        self.put_back(refused.values())
        ends = [end for end in message.finished if end.slot not in refused]
        return msgspec.structs.replace(message, finished=ends)

    def put_back(self, refused: Collection[Entry]) -> None:
        """Let replays wait that the core has refused."""
        unsent = self.slots() | {awaited.slot for _, awaited in refused}
        in_core = {stream.tenant for stream, awaited in self._requests.live() if awaited.slot not in unsent}
        for stream, awaited in refused:
            self.replays.put_back(stream, awaited, was_alone=stream.tenant not in in_core)

    def remove(self, slots: Collection[int]) -> list[Entry]:
        """Remove the requests that have one of `slots`, and return them."""
        held_back = [entry for entry in self._held_back if entry[1].slot in slots]
        if held_back:
            self._held_back = [entry for entry in self._held_back if entry not in held_back]
        return [*held_back, *self.replays.remove(slots)]

    def forget(self, streams: Collection[RequestStream]) -> None:
        """Forget streams with which another core goes on."""
        self._held_back = [entry for entry in self._held_back if entry[0] not in streams]
        self.replays.forget(streams)

    def clear(self) -> None:
        """Forget all requests, because there is another core."""
        self._held_back.clear()
        self.replays.clear()

    def _must_wait(self, entry: Entry, priorities: Mapping[int, int]) -> bool:
        """Return whether `entry` must be held back; `priorities` are the `refused_priorities` of the replays."""
        stream, awaited = entry
        if self._suspects.is_held_back(awaited):
            return True
        waits_for = [priorities[tenant] for tenant in (stream.tenant, ALL_TENANTS) if tenant in priorities]
        return not stream.is_replay and bool(waits_for) and stream.priority >= min(waits_for)
