"""The clients of a core: who has said hello, and who has left."""

import time

import zmq

from vllm_mp import wire

_PROBE_INTERVAL_S = 2.0


class Clients:
    """Numbers the clients that have said hello, and sends messages to them.

    A client's number is never given to another client.
    """

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        self._number_of: dict[bytes, int] = {}
        """By identity, the frame that the ROUTER socket puts before each message of a client."""
        self._identity_of: dict[int, bytes] = {}
        self._token_of: dict[int, bytes] = {}
        self._number_with: dict[bytes, int] = {}
        """By token, of the clients that have one."""
        self._next_number = 0
        self._last_probe = time.monotonic()

    def __len__(self) -> int:
        """Return the number of clients that have said hello and are not known to have left."""
        return len(self._identity_of)

    def find(self, identity: bytes) -> int | None:
        """Return the number of a client; None if it has not said hello."""
        return self._number_of.get(identity)

    def find_token(self, token: bytes) -> int | None:
        """Return the number of the client that has said hello with `token`; None if there is none."""
        return self._number_with.get(token)

    def add(self, identity: bytes, token: bytes) -> int:
        """Return a number for a client that has not said hello before, and whose `token` no other client has.

        Raises ValueError if there are too many clients.
        """
        if len(self) >= wire.MAX_CLIENTS:
            raise ValueError(f"too many clients of this core: the limit is {wire.MAX_CLIENTS}; close some clients")
        number = self._next_number
        self._next_number += 1
        self._number_of[identity] = number
        self._identity_of[number] = identity
        self._token_of[number] = token
        if token:
            self._number_with[token] = number
        return number

    def remove(self, client: int) -> None:
        """Forget a client that has left."""
        del self._number_of[self._identity_of.pop(client)]
        self._number_with.pop(self._token_of.pop(client), None)

    def take_probes(self) -> list[int]:
        """Return the clients that should be sent a probe now, to find those that have left without a Bye.

        That is none, or all once in `_PROBE_INTERVAL_S`.
        """
        now = time.monotonic()
        if now < self._last_probe + _PROBE_INTERVAL_S:
            return []
        self._last_probe = now
        return list(self._identity_of)

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
