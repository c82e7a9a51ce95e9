"""The core's socket, bound to an address that no other process serves."""

import contextlib
import fcntl
import logging
import os
import stat
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from vllm_mp.authorized_clients import AuthorizedClients
from vllm_mp.curve_keys import encode_key, read_server_key
from vllm_mp.descriptor_limit import raise_descriptor_limit
from vllm_mp.file_owner import check_writers, trusted_owners
from vllm_mp.wire import MAX_MESSAGE_BYTES, TCP_HEARTBEAT_MS

logger = logging.getLogger(__name__)

_MAX_UNREAD = 32
"""Number of unread messages of each client that the core holds."""
_MAX_LOCK_TRIES = 100
_MAX_KEYS_LOGGED = 64
"""Number of unknown keys that the log names, so that no flood of clients fills it."""


class BoundSocket:
    """A bound ROUTER socket; `close` removes the socket file and its lock.

    A Unix socket has a lock file, because binding its path would silently take it from a process that already serves
    it. A TCP socket speaks CURVE and admits only the authorized clients of the server's key file.
    """

    def __init__(self, address: str, key_file: str | None = None) -> None:
        """Bind `address`, ipc://PATH or tcp://HOST:PORT.

        Raises ValueError, naming the address and the remedy, if it is malformed, in use or not permitted.
        """
        self._address = address
        self._lock: int | None = None
        self._path: Path | None = None
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
            if address.startswith(("ipc://@", "ipc://*")):
                raise ValueError(f"address {address!r} must name a path: ipc:///PATH/TO/SOCKET")
            if address.startswith("ipc://"):
                self._lock_path(Path(address.removeprefix("ipc://")))
            elif address.startswith("tcp://"):
                self._require_keys(key_file)
            else:
                raise ValueError(f"address {address!r} must begin with ipc:// or tcp://")
            self._bind()
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
        if self._lock is not None and self._path is not None:
            for path in (self._path, _lock_file(self._path)):
                with contextlib.suppress(OSError):  # if the folder was removed or moved
                    path.unlink()
            os.close(self._lock)
            self._lock = None

    def _bind(self) -> None:
        # The socket has its mode from the beginning: between bind and chmod, others could connect.
        mask = os.umask(0o177)
        try:
            self.socket.bind(self._address)
        except zmq.ZMQError as error:
            remedy = "choose another address, or stop the process that uses this one"
            if error.errno != zmq.EADDRINUSE:
                remedy = "give ipc:///PATH/TO/SOCKET in a writable folder, or tcp://HOST:PORT"
            raise ValueError(f"cannot listen on {self._address}: {error.strerror}; {remedy}") from error
        finally:
            os.umask(mask)

    def _lock_path(self, path: Path) -> None:
        """Lock `path`, and write this process's pid to the lock file.

        Raises ValueError if another process holds the lock, if `path` cannot be a socket, or if other users can write
        its folder.
        """
        if len(os.fsencode(path)) > zmq.IPC_PATH_MAX_LEN:
            raise ValueError(
                f"the path of {self._address} is longer than {zmq.IPC_PATH_MAX_LEN} bytes, the limit of Unix sockets; "
                "choose a shorter path"
            )
        try:
            check_writers(path.parent, trusted_owners())
            if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
                raise ValueError(
                    f"cannot listen on {self._address}: the path is a file, not a socket; choose another path"
                )
            lock = None
            for _ in range(_MAX_LOCK_TRIES):
                if (lock := self._try_lock(_lock_file(path))) is not None:
                    break  # else the previous owner removed the file at that moment
            if lock is None:
                raise ValueError(f"cannot lock {_lock_file(path)}: it keeps changing; choose another folder")
        except OSError as error:
            raise ValueError(
                f"cannot listen on {self._address}: {error.strerror}; give a path in a folder that exists and "
                "is writable"
            ) from error
        os.ftruncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
        self._lock, self._path = lock, path

    def _try_lock(self, file: Path) -> int | None:
        """Return a descriptor of the locked `file`, or None if the file was removed before it was locked.

        A lock on a removed file would exclude no other process. Raises ValueError if another process holds the lock,
        and OSError if the file cannot be opened.
        """
        lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.read(lock, 32).decode("ascii", "replace").strip()
            os.close(lock)
            raise ValueError(
                f"{self._address} is already served by process {owner or 'unknown'}; choose another address, or stop "
                "that process"
            ) from error
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(lock), file.stat()):
                return lock
        os.close(lock)
        return None

    def _require_keys(self, key_file: str | None) -> None:
        """Admit only the clients that `key_file` authorizes; raise ValueError without a file or with a bad file."""
        if key_file is None:
            raise ValueError(
                f"{self._address} is a TCP address, which needs keys: give --key-file FILE, made with "
                "`vllm-mp keys server FILE`"
            )
        key = read_server_key(key_file)
        clients = AuthorizedClients(key_file)
        if not clients.read():
            logger.warning("no client may connect yet: %s lists none; add some with `vllm-mp keys allow`", clients.path)
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=_KeyCheck(clients))
        # Only heartbeats show that a client vanished without closing the connection.
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, TCP_HEARTBEAT_MS)
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * TCP_HEARTBEAT_MS)
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


def _lock_file(path: Path) -> Path:
    return path.with_name(path.name + ".lock")
