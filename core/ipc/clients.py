"""The clients of a core: who has said hello, who has left, and who does not read."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import zmq

from vllm_mp import wire
from vllm_mp.core.ipc.client_log import ClientLog
from vllm_mp.core.ipc.client_places import ClientPlaces
from vllm_mp.core.ipc.peer_connection import PeerConnection
from vllm_mp.core.ipc.unread_output import UnreadOutput

_NOBLOCK, _NOBLOCK_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK) | int(zmq.SNDMORE)
"""As numbers, because enums take longer to combine."""
_LOOK_INTERVAL_S = 1.0
_MAX_UNREAD_BYTES = 64 * 2**20
"""Output that a client may leave unread."""
_MAX_UNREAD_BYTES_OF_ALL = 2**30
"""The same for all clients together, in equal shares."""
_CONFIRM_S = 0.02
"""Time in which ZeroMQ's thread tells the socket that a connection has ended."""
_MAX_REFUSALS = 16
"""Refusals that a peer may get without being a client; then its connection is closed."""


V = TypeVar("V")


@dataclass(slots=True)
class _Client:
    identity: bytes
    """The frame that the ROUTER socket puts before each message of the client."""
    token: bytes
    connection: PeerConnection | None
    owner: str
    unread: UnreadOutput = field(default_factory=UnreadOutput)


class _Closing(NamedTuple):
    """A connection to close."""

    connection: PeerConnection
    why: str
    due: float
    """In seconds of `time.monotonic()`."""


class Clients:
    """Numbers the clients that have said hello, and sends messages to them.

    A client's number is never given to another client.
    """

    def __init__(
        self, socket: "zmq.Socket[bytes]", incarnation: int, is_shared: bool, returning: Iterable[bytes] = ()
    ) -> None:
        """`is_shared`: a client that leaves too much output unread is dropped, and the log names the clients.

        `returning` are the tokens of the clients that the predecessor had.
        """
        self._socket = socket
        self._incarnation = incarnation
        self._is_shared = is_shared
        self._clients: dict[int, _Client] = {}
        self._places = ClientPlaces(returning)
        self._number_of: dict[bytes, int] = {}
        """By identity."""
        self._number_with: dict[bytes, int] = {}
        """By token, of the clients that have one."""
        self._next_number = 0
        self._last_look = time.monotonic()
        self._closing: dict[bytes, _Closing] = {}
        """By identity, the connections to close."""
        self._closed: dict[bytes, PeerConnection] = {}
        """By identity, the connections that were closed last; messages that they brought may still arrive."""
        self._unconfirmed: list[int] = []
        """Clients that have said hello since the last look."""
        self._sent_to: set[int] = set()
        """Clients that were sent a message since the last call of `take_slow`."""
        self._num_refusals: dict[bytes, int] = {}
        """By identity, of peers that are not clients."""
        self._why_dropped: dict[bytes, str] = {}
        """By token, of clients that were dropped and have not come back."""
        self._log = ClientLog() if is_shared else None

    def __len__(self) -> int:
        """Return the number of clients that have said hello and are not known to have left."""
        return len(self._clients)

    def numbers(self) -> list[int]:
        """Return the numbers of all clients."""
        return list(self._clients)

    def find(self, identity: bytes) -> int | None:
        """Return the number of a client; None if it has not said hello."""
        return self._number_of.get(identity)

    def token_of(self, client: int) -> bytes:
        """Return the token with which a client said hello; empty if it has none."""
        return self._clients[client].token

    def owner_of(self, client: int) -> str:
        """Return the process or the key that a client belongs to; empty if it is not known."""
        return self._clients[client].owner

    def find_token(self, token: bytes) -> int | None:
        """Return the number of the client that has said hello with `token`; None if there is none."""
        return self._number_with.get(token)

    def add(
        self,
        identity: bytes,
        token: bytes,
        connection: PeerConnection | None,
        is_operator: bool = False,
        has_place: bool = False,
    ) -> int:
        """Return a number for a client that has not said hello before, and whose `token` no other client has.

        `has_place`: the client was removed a moment ago, and connects again. Raises ValueError if there is no place.
        """
        owner = "" if connection is None else connection.owner
        if not has_place:
            self._places.check(owner, token, is_operator)
        self._places.take(owner, token)
        number = self._next_number
        self._next_number += 1
        self._clients[number] = _Client(identity, token, connection, owner)
        self._number_of[identity] = number
        self._unconfirmed.append(number)
        self._num_refusals.pop(identity, None)
        if token:
            self._number_with[token] = number
        if self._log is not None:
            self._log.joined(number, connection)
        return number

    def remove(self, client: int) -> None:
        """Forget a client that has left."""
        removed = self._clients.pop(client)
        self._places.give_back(removed.owner)
        del self._number_of[removed.identity]
        self._number_with.pop(removed.token, None)
        if self._log is not None:
            self._log.left(client)

    def drop(self, client: int, why: str) -> None:
        """Forget a client and close its connection; it is told `why` when it comes back."""
        dropped = self._clients[client]
        self.close(dropped.identity, dropped.connection, why)
        if dropped.token:
            _remember(self._why_dropped, dropped.token, why)
        self.remove(client)

    def close(self, identity: bytes, connection: PeerConnection | None, why: str) -> None:
        """Close the connection of a peer soon, with a last `Refused` that the peer may not read any more."""
        if connection is not None:
            self._closing.setdefault(identity, _Closing(connection, why, time.monotonic() + _CONFIRM_S))

    def is_closing(self, identity: bytes, connection: PeerConnection | None) -> bool:
        """Return whether the connection that brought a message of a peer is to be closed, or was closed.

        `connection` is None if ZeroMQ has closed it already.
        """
        closing = self._closing.get(identity)
        closed = self._closed.get(identity) if closing is None else closing.connection
        return closed is not None and connection in (closed, None)

    def close_due(self) -> None:
        """Close the connections that are due.

        A message may outlive its connection, and another peer's connection may have got the descriptor before the
        message was read. Then sending fails, as soon as ZeroMQ's thread has told the socket of the end.
        """
        now = time.monotonic()
        for identity, closing in list(self._closing.items()):
            if now >= closing.due:
                del self._closing[identity]
                _remember(self._closed, identity, closing.connection)
                if self._send(identity, wire.encode(wire.Refused(closing.why))):
                    closing.connection.close()

    def take_why_dropped(self, token: bytes) -> str:
        """Return why the client that comes back with `token` was dropped; empty if it was not."""
        return self._why_dropped.pop(token, "")

    def find_gone(self) -> list[int]:
        """Return the clients that have left without a Bye; looks for them once in `_LOOK_INTERVAL_S`."""
        now = time.monotonic()
        if now < self._last_look + _LOOK_INTERVAL_S:
            return []
        self._last_look = now
        gone = [
            number
            for number, client in self._clients.items()
            if client.connection is None or not client.connection.is_open
        ]
        # The connection of a client that left before its hello was read may be that of another peer. Sending shows it.
        unconfirmed, self._unconfirmed = self._unconfirmed, []
        probe = wire.StepOutput(self._incarnation, 0, b"", b"", b"")
        return gone + [number for number in unconfirmed if number not in gone and not self.send(number, probe)]

    def take_slow(self) -> list[tuple[int, int]]:
        """Return (client, unread bytes) of the clients that leave too much unread; call this between two steps."""
        sent_to, self._sent_to = self._sent_to, set()
        if not self._is_shared:
            return []
        limit = min(_MAX_UNREAD_BYTES, _MAX_UNREAD_BYTES_OF_ALL // max(1, len(self)))
        live = [(number, self._clients[number].unread) for number in sent_to if number in self._clients]
        return [(number, unread.num_bytes) for number, unread in live if unread.exceeds(limit)]

    def note_seen(self, client: int, mark: int) -> bool:
        """Count all that `client` was sent before `mark` as read; return False if no such mark is awaited."""
        return self._clients[client].unread.note_seen(mark)

    def send(self, client: int, message: wire.CoreMessage) -> bool:
        """Send `message` unless the client was removed; return False if the client turns out to be gone."""
        receiver = self._clients.get(client)
        if receiver is None:
            return True
        frame = wire.encode(message)
        if not self._send(receiver.identity, frame):
            return False
        self._sent_to.add(client)
        mark = receiver.unread.add(len(frame), isinstance(message, wire.StepOutput) and message.step > 0)
        return mark is None or self._send(receiver.identity, wire.encode(wire.Mark(self._incarnation, mark)))

    def refuse(self, identity: bytes, connection: PeerConnection | None, reason: str) -> None:
        """Tell a peer why it is not served; close its connection if it has been told often and goes on."""
        num_refusals = self._num_refusals.get(identity, 0) + 1
        _remember(self._num_refusals, identity, num_refusals)
        if num_refusals > _MAX_REFUSALS:
            self.close(identity, connection, reason)
        else:
            self._send(identity, wire.encode(wire.Refused(reason)))

    def _send(self, identity: bytes, frame: bytes) -> bool:
        """Send `frame` to a peer; return False if the peer is gone."""
        try:
            self._socket.send(identity, _NOBLOCK_MORE)
            self._socket.send(frame, _NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        return True


def _remember(values: dict[bytes, V], key: bytes, value: V) -> None:
    """Set `values[key]`, and forget the oldest value if there are more than one for each client that there may be."""
    values.pop(key, None)
    values[key] = value
    if len(values) > wire.MAX_CLIENTS:
        del values[next(iter(values))]
