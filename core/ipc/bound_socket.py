"""The core's socket: at a private address for its parent, and at an address for other clients that the parent holds."""

import contextlib
import logging
import os
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from vllm_mp.authorized_clients import AuthorizedClients
from vllm_mp.core_launch import PublicAddress
from vllm_mp.curve_keys import encode_key, read_server_key
from vllm_mp.descriptor_limit import raise_descriptor_limit
from vllm_mp.wire import MAX_MESSAGE_BYTES

logger = logging.getLogger(__name__)

_MAX_UNREAD = 32
"""Number of unread messages of each client that the core holds."""
PROBE_S = 5
"""Seconds without a packet after which the system probes whether a client over TCP is there; it gets three of them."""
_MAX_KEYS_LOGGED = 64
"""Number of unknown keys that the log names, so that no flood of clients fills it."""


class BoundSocket:
    """A bound ROUTER socket; `close` removes the socket file of the private address.

    A TCP address speaks CURVE and admits only the authorized clients of the server's key file.
    """

    def __init__(self, address: str, public: PublicAddress | None = None) -> None:
        """Bind `address`, ipc://PATH in a private folder, and listen at `public`.

        Raises ValueError, naming the address and the remedy, if it is malformed or not permitted, or if the key file
        cannot be read.
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
            # The socket has its mode from the beginning: between bind and chmod, others could connect.
            mask = os.umask(0o177)
            try:
                self._bind(address)
            finally:
                os.umask(mask)
            if public is not None:
                self._listen(public)
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

    def _bind(self, address: str) -> None:
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            raise ValueError(
                f"cannot listen on {address}: {error.strerror}; set TMPDIR to a writable folder with a short path"
            ) from error

    def _listen(self, public: PublicAddress) -> None:
        """Accept connections of the listening socket that the parent holds."""
        if public.address.startswith("tcp://"):
            self._require_keys(public)
        # These options apply to the addresses that are bound from now on.
        self.socket.setsockopt(zmq.USE_FD, public.listener)
        self._bind(public.address)

    def _require_keys(self, public: PublicAddress) -> None:
        """Admit only the clients that the key file authorizes; raise ValueError if it is a bad file."""
        assert public.key_file is not None
        key = read_server_key(public.key_file)
        clients = AuthorizedClients(public.key_file)
        if not clients.read():
            logger.warning("no client may connect yet: %s lists none; add some with `vllm-mp keys allow`", clients.path)
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=_KeyCheck(clients))
        # The system's probes show that a client vanished without closing its connection. ZeroMQ's heartbeats would
        # abort this process if a connection breaks while its messages wait for room (libzmq 4.3.5, `!_io_error`).
        self.socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self.socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, PROBE_S)
        self.socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, PROBE_S)
        self.socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 2)
        self.socket.setsockopt(zmq.TCP_MAXRT, 3000 * PROBE_S)
        self.socket.curve_server = True
        self.socket.curve_publickey, self.socket.curve_secretkey = key


class _KeyCheck:
    """Admits the clients that are authorized when they connect. Runs in the authenticator's thread."""

    def __init__(self, clients: AuthorizedClients) -> None:
        self._clients = clients
        self._logged: set[bytes] = set()
        """The keys that were refused, as far as the log names them."""

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether the client with the public `key`, in Z85, may connect."""
        public = z85.decode(key)
        try:
            clients = self._clients.read()
        except ValueError as error:
            logger.error("a client is refused: %s", error)
            return False
        if public in clients.values():
            return True
        if public not in self._logged and len(self._logged) < _MAX_KEYS_LOGGED:
            self._logged.add(public)
            logger.warning("a client with the unknown key %s is refused; see `vllm-mp keys allow`", encode_key(public))
        return False
