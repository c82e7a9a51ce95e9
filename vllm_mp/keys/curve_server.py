"""Sockets on TCP that admit only peers with an authorized key, by ZeroMQ's CURVE."""

import logging
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from vllm_mp.keys.authorized_clients import AuthorizedClients
from vllm_mp.keys.curve_keys import encode_key, read_server_key

logger = logging.getLogger(__name__)

PROBE_S = 5
"""Seconds without a packet after which the system probes whether a peer over TCP is there; it gets three of them."""
_MAX_KEYS_LOGGED = 64
"""Number of unknown keys that the log names, so that no flood of peers fills it."""


def require_keys(socket: "zmq.Socket[bytes]", key_file: str | Path) -> ThreadAuthenticator:
    """Admit to `socket` only the peers that are authorized beside `key_file`; applies to addresses bound from now on.

    Return the thread that checks keys, which must be stopped after the socket is closed. Raises ValueError if the file
    is not a good key file of a server.
    """
    key = read_server_key(key_file)
    clients = AuthorizedClients(key_file)
    if not clients.read():
        logger.warning("no client may connect yet: %s lists none; add some with `vllm-mp keys allow`", clients.path)
    authenticator = ThreadAuthenticator(socket.context)
    authenticator.start()
    authenticator.configure_curve_callback(domain="*", credentials_provider=_KeyCheck(clients))
    probe_peers(socket)
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = key
    return authenticator


def probe_peers(socket: "zmq.Socket[bytes]") -> None:
    """Let the system find out that a peer of `socket` has vanished without closing its connection.

    ZeroMQ's heartbeats would abort this process if a connection breaks while its messages wait for room (libzmq 4.3.5,
    `!_io_error`).
    """
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, PROBE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, PROBE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 2)
    socket.setsockopt(zmq.TCP_MAXRT, 3000 * PROBE_S)


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
