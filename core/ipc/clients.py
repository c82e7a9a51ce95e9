"""The clients of a core: who has said hello, and who has left."""

import time

import zmq

from vllm_mp import wire

_PROBE_INTERVAL_S = 1.0
_MAX_CLIENTS = 4096


class Clients:
    """Numbers the clients that have said hello, and sends messages to them.

    A client's number is never given to another client.
    """

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        self._number_of: dict[bytes, int] = {}
        """By identity, the frame that the ROUTER socket puts before each message of a client."""
        self._identity_of: dict[int, bytes] = {}
        self._next_number = 0
        self._probe_below = 0
        """Clients with lower numbers connected before the latest hello, and may have left without a Bye."""
        self._last_probe = -_PROBE_INTERVAL_S

    def __len__(self) -> int:
        """Return the number of clients that have said hello and are not known to have left."""
        return len(self._identity_of)

    def numbers(self) -> list[int]:
        """Return the numbers of all clients."""
        return list(self._identity_of)

    def find(self, identity: bytes) -> int | None:
        """Return the number of a client; None if it has not said hello."""
        return self._number_of.get(identity)

    def add(self, identity: bytes) -> int:
        """Return the number of a client that says hello: a new number, unless it has said hello before.

        Raises ValueError if there are too many clients.
        """
        self._probe_below = self._next_number
        number = self._number_of.get(identity)
        if number is not None:
            return number
        if len(self) >= _MAX_CLIENTS:
            raise ValueError(f"too many clients of this core: the limit is {_MAX_CLIENTS}; close some clients")
        number = self._next_number
        self._next_number += 1
        self._number_of[identity] = number
        self._identity_of[number] = identity
        return number

    def remove(self, client: int) -> None:
        """Forget a client that has left."""
        del self._number_of[self._identity_of.pop(client)]

    def take_probes(self) -> list[int]:
        """Return the clients that should be sent a probe now, to find those that have left without a Bye.

        Probes follow a hello, at most once in `_PROBE_INTERVAL_S`, and go to all clients that connected before it.
        """
        if not self._probe_below or time.monotonic() < self._last_probe + _PROBE_INTERVAL_S:
            return []
        due = [client for client in self._identity_of if client < self._probe_below]
        self._probe_below, self._last_probe = 0, time.monotonic()
        return due

    def send(self, client: int, message: wire.CoreMessage) -> bool:
        """Send `message` unless the client was removed; return False if the client turns out to be gone."""
        identity = self._identity_of.get(client)
        return identity is None or self.reply(identity, message)

    def reply(self, identity: bytes, message: wire.CoreMessage) -> bool:
        """Send `message` to a peer that need not have said hello; return False if the peer is gone."""
        try:
            self._socket.send_multipart((identity, wire.encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        return True
