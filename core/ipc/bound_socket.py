"""The core's socket: at a private address for its parent, and at an address for other clients that the parent holds."""

import contextlib
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from vllm_mp.core_link.core_launch import PublicAddress
from vllm_mp.keys.curve_server import require_keys
from vllm_mp.machine.descriptor_limit import raise_descriptor_limit
from vllm_mp.wire import MAX_MESSAGE_BYTES

_MAX_UNREAD = 32
"""Number of unread messages of each client that the core holds."""


class BoundSocket:
    """A bound ROUTER socket; `close` removes the socket file of the private address.

    A TCP address speaks CURVE and admits only the authorized clients of the server's key file.
    """

    def __init__(self, address: str, listener: int, public: PublicAddress | None = None) -> None:
        """Accept the connections of the descriptor `listener`, which listens at ipc://PATH, and those at `public`.

        The descriptors belong to this object then. Raises ValueError, naming the address, if one cannot be used, or if
        the key file cannot be read.
        """
        self._path = Path(address.removeprefix("ipc://"))
        self._authenticator: ThreadAuthenticator | None = None
        raise_descriptor_limit()  # libzmq ends the process if a connection finds no descriptor left
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        # A message to a client that has gone raises instead of being dropped silently. The send queue has no limit
        # here: `Clients` drops a client that leaves too many bytes unread. Messages that a client sends faster than
        # the core reads them wait with the client.
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, _MAX_UNREAD)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self.socket.setsockopt(zmq.LINGER, 0)
        try:
            self._accept(address, listener)
            if public is not None:
                self.listen(public)
        except BaseException:
            self.close()
            raise

    def close(self, linger_ms: int = 0) -> None:
        """Unbind, after unsent messages had `linger_ms` milliseconds to leave. No-op if already closed."""
        if self.socket.closed:
            return
        self.socket.close(linger=linger_ms)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        with contextlib.suppress(OSError):  # if the folder was removed or moved
            self._path.unlink()

    def _accept(self, address: str, listener: int) -> None:
        """Accept the connections of the descriptor `listener`, which listens at `address`."""
        self.socket.setsockopt(zmq.USE_FD, listener)  # for the next address that is bound
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            raise ValueError(f"cannot listen on {address}: {error.strerror}; choose another address") from error

    def listen(self, public: PublicAddress) -> None:
        """Accept connections of the listening socket that the parent holds; raises what the constructor raises."""
        if public.address.startswith("tcp://"):
            assert public.key_file is not None
            self._authenticator = require_keys(self.socket, public.key_file)
        self._accept(public.address, public.listener)
