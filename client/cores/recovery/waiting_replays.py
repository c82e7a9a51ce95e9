"""The replays that a core has no room for yet.

Once an image is encoded, a core keeps its embeddings alone, which are far smaller than its arrays. So the live requests
of a core that died may need more memory in the successor than a client gets there. Replays with images are sent a few
at a time: the next ones when the core has read the prompts of earlier ones. Any replay that the core refuses for lack
of room (`wire.Finished.no_room`) waits, and is sent again until there is room. Its consumer sees a longer pause.

Until the core has begun such a replay, new requests of its tenant are held back: small ones would take the room that
becomes free, and a large replay would wait for ever. Other tenants need not wait, because the core leaves room for each
tenant, unless the replay is larger than that room: it was refused although its tenant had nothing else in the core.
Requests of a higher priority go first in any case, as in the core.

The replays that wait take turns, because there may be room for the requests of one tenant and not of another. The order
in which they run does not depend on that: the core goes by their times of arrival.
"""

import asyncio
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from typing import Final

from vllm_mp.client.cores.recovery.suspects import Entry
from vllm_mp.client.outputs.stream import Awaited, RequestStream
from vllm_mp.requests.images import ProcessedImage

ALL_TENANTS: Final = -1
"""In place of the number of a tenant: all of them."""
_MAX_UNREAD_BYTES: Final = 2**28
"""Limit of the bytes of images that the core has of replays whose prompts it has not read; one replay may have more."""
_MAX_SENT: Final = 16
"""Number of replays that are sent again at once; after a refusal, one."""
_REST_S: Final = 0.05
"""Seconds without a further attempt after a refusal."""
_RETRY_S: Final = 0.25
"""Seconds after which there may be room although no request of this client has ended."""


class WaitingReplays:
    """The replays of one client that wait for room in its core, the next to send first."""

    def __init__(self, send: "weakref.WeakMethod[Callable[[], None]]") -> None:
        """`send` sends what `take` yields. The reference is weak, so that a timer does not keep a client alive."""
        self._send = send
        self._waiting: deque[Entry] = deque()
        self._unread: dict[Awaited, tuple[RequestStream, int]] = {}
        """The replays with images that were sent, each with its stream and number of tokens at that time."""
        self._num_holders: Counter[bytes] = Counter()
        """By digest of an image: the number of replays in `_unread` that have it."""
        self._num_unread_bytes = 0
        self._refused: dict[Awaited, tuple[RequestStream, int]] = {}
        """The replays that the core has refused and not begun since, each with its stream and number of tokens."""
        self._was_alone: set[Awaited] = set()
        """Those of `_refused` that were refused although their tenant had nothing else in the core."""
        self._was_refused = False
        """The core has refused a replay since the latest attempt."""
        self._rests_until = 0.0
        """In seconds of `time.monotonic()`."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop that is about to call `_retry`."""

    def refused_priorities(self) -> dict[int, int]:
        """Return the highest priority, the smallest number, of the replays for which requests of a tenant must wait.

        By tenant; `ALL_TENANTS` has that of the replays for which all tenants must wait.
        """
        for awaited in _begun(self._refused):
            self._forget_refused(awaited)
        priorities: dict[int, int] = {}
        for awaited, (stream, _) in self._refused.items():
            tenant = ALL_TENANTS if awaited in self._was_alone else stream.tenant
            priorities[tenant] = min(stream.priority, priorities.get(tenant, stream.priority))
        return priorities

    def slots(self) -> set[int]:
        """Return the slots of the replays that wait."""
        return {awaited.slot for _, awaited in self._waiting}

    def begin(self, stream: RequestStream, awaited: Awaited) -> bool:
        """Return whether to send a replay now, and note that it is sent; if not, it waits."""
        if not stream.images:
            return True
        if not self._has_room(stream):
            self._waiting.append((stream, awaited))
            return False
        self._forget_unread(awaited)
        self._unread[awaited] = stream, awaited.num_tokens
        for digest, image in stream.images.items():
            self._num_unread_bytes += 0 if self._num_holders[digest] else _size(image)
            self._num_holders[digest] += 1
        return True

    def put_back(self, stream: RequestStream, awaited: Awaited, was_alone: bool) -> None:
        """Let a replay wait that the core has refused; `was_alone`: its tenant had nothing else in the core."""
        self._forget_unread(awaited)
        self._refused[awaited] = stream, awaited.num_tokens
        if was_alone:
            self._was_alone.add(awaited)
        self._waiting.append((stream, awaited))
        self._was_refused = True
        self._rests_until = time.monotonic() + _REST_S

    def take(self) -> Iterator[Entry]:
        """Yield, and wait no longer for, the replays to send now; the caller sends each before it takes the next."""
        if time.monotonic() < self._rests_until:
            return
        most, self._was_refused = 1 if self._was_refused else _MAX_SENT, False
        for _ in range(most):
            if not self._waiting or not self._has_room(self._waiting[0][0]):
                return
            yield self._waiting.popleft()

    def note_output(self, has_ends: bool) -> None:
        """Send waiting replays if the output that the streams just got says that there is more room.

        `has_ends`: requests of this client have ended.
        """
        if not self._waiting and not self._unread:
            return
        read = _begun(self._unread)
        for awaited in read:
            self._forget_unread(awaited)
        if self._waiting and (read or has_ends):
            self._call_send()

    def retry_later(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Send waiting replays in a moment on `loop`, if there are any; None: no loop runs."""
        if self._waiting and loop is not None and loop is not self._loop:
            self._loop = loop
            loop.call_later(_RETRY_S, self._retry, loop)

    def remove(self, slots: Collection[int]) -> list[Entry]:
        """Remove the waiting replays that have one of `slots`, and return them."""
        removed = [entry for entry in self._waiting if entry[1].slot in slots]
        if removed:
            self._waiting = deque(entry for entry in self._waiting if entry[1].slot not in slots)
        for _, awaited in removed:
            self._forget_refused(awaited)
        return removed

    def forget(self, streams: Collection[RequestStream]) -> None:
        """Forget streams with which another core goes on."""
        self._waiting = deque(entry for entry in self._waiting if entry[0] not in streams)
        for awaited in [awaited for stream in streams for awaited in stream.awaited]:
            self._forget_unread(awaited)
            self._forget_refused(awaited)

    def clear(self) -> None:
        """Forget all replays, because there is another core."""
        self._waiting.clear()
        self._refused.clear()
        self._was_alone.clear()
        self._unread.clear()
        self._num_holders.clear()
        self._num_unread_bytes = 0
        self._was_refused, self._rests_until = False, 0.0

    def _has_room(self, stream: RequestStream) -> bool:
        """Return whether the core may get the images of `stream` now."""
        new = sum(_size(image) for digest, image in stream.images.items() if not self._num_holders[digest])
        return not self._unread or self._num_unread_bytes + new <= _MAX_UNREAD_BYTES

    def _forget_unread(self, awaited: Awaited) -> None:
        if (unread := self._unread.pop(awaited, None)) is None:
            return
        for digest, image in unread[0].images.items():
            self._num_holders[digest] -= 1
            if not self._num_holders[digest]:
                del self._num_holders[digest]
                self._num_unread_bytes -= _size(image)

    def _forget_refused(self, awaited: Awaited) -> None:
        self._refused.pop(awaited, None)
        self._was_alone.discard(awaited)

    def _retry(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop is self._loop:
            self._loop = None
            self._call_send()

    def _call_send(self) -> None:
        if (send := self._send()) is not None:
            send()


def _begun(replays: dict[Awaited, tuple[RequestStream, int]]) -> list[Awaited]:
    """Return those of `replays`, with the numbers of their tokens before, of which there is output now, or an end."""
    return [
        awaited
        for awaited, (stream, num_tokens) in replays.items()
        if awaited.num_tokens > num_tokens or awaited.finish is not None or stream.is_over
    ]


def _size(image: ProcessedImage) -> int:
    """Return the bytes of the arrays of an image."""
    return sum(len(array.data) for array in image.arrays)
