"""An address that a process holds for the cores that it starts there in turn."""

import contextlib
import fcntl
import os
import re
import socket
import stat
import time
from collections.abc import Sequence
from pathlib import Path

import zmq

from vllm_mp.core_link.core_launch import PublicAddress, lock_path
from vllm_mp.machine.file_owner import check_writers, open_own_file, trusted_owners

_BACKLOG = 1024
"""Number of connections that wait for the next core."""
_MAX_LOCK_TRIES = 100
_MAX_PORT = 65_535
_ORPHAN_TIMEOUT_S = 10.0
"""Time that a core whose parent was killed gets to end and to free its address."""
_ORPHAN_POLL_S = 0.1


class HeldAddress:
    """The listening socket of an address, and for a Unix socket its lock; each core inherits both.

    No other process can take the address between two cores, and connections that arrive then wait for the next core.
    A Unix socket needs the lock file, because binding its path would silently take it from a process that serves it.
    """

    def __init__(self, address: str, key_file: str | None = None) -> None:
        """Listen at `address`, ipc://PATH or tcp://HOST:PORT; port 0: a free port. TCP needs `key_file`.

        Raises ValueError, naming the address and the remedy, if it is malformed, in use or not permitted, or if other
        users can write its folder.
        """
        check_address(address, key_file)
        self.address = address
        self.path: Path | None = None
        """The path of a Unix socket; None for TCP."""
        self._key_file = key_file
        self._lock: int | None = None
        self._socket: socket.socket | None = None
        self._inode: os.stat_result | None = None
        """The socket file as this process has made it."""
        if address.startswith("ipc://"):
            self.path = Path(address.removeprefix("ipc://"))
            self.restore()
        else:
            self._listen_on_tcp()

    @classmethod
    def inherited(cls, address: str, key_file: str | None, descriptors: Sequence[int]) -> "HeldAddress":
        """Return the address that another process has held; `descriptors` are those of its object.

        Raises ValueError, with the remedy, if `address` needs a key file and there is none.
        """
        check_address(address, key_file)
        held = cls.__new__(cls)
        held.address, held._key_file = address, key_file
        held._socket = socket.socket(fileno=descriptors[0])
        held._lock, held.path, held._inode = None, None, None
        if address.startswith("ipc://"):
            held.path = Path(address.removeprefix("ipc://"))
            held._lock = descriptors[1]
            with contextlib.suppress(FileNotFoundError):
                held._inode = held.path.stat()
        return held

    def note_owner(self) -> None:
        """Name this process in the lock file in place of that from which it has inherited the address."""
        if self._lock is not None:
            _write_owner(self._lock)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The descriptors that a core must inherit."""
        assert self._socket is not None
        return (self._socket.fileno(),) if self._lock is None else (self._socket.fileno(), self._lock)

    def public_address(self) -> PublicAddress:
        """Return what a core must be told of the address."""
        assert self._socket is not None
        return PublicAddress(address=self.address, listener=self._socket.fileno(), key_file=self._key_file)

    def restore(self) -> bool:
        """Listen at the path of a Unix socket, unless this process does; return whether it did not.

        The socket file is missing at first, and after a cleaner of temporary files has removed it. Raises ValueError as
        the constructor does.
        """
        if self.path is None:
            return False
        with contextlib.suppress(OSError):
            if self._inode is not None and os.path.samestat(self._inode, self.path.stat()):
                return False
        self.close()
        try:
            check_writers(self.path.parent, trusted_owners())
            if self.path.exists() and not stat.S_ISSOCK(self.path.stat().st_mode):
                raise ValueError(
                    f"cannot listen on {self.address}: the path is a file, not a socket; choose another path"
                )
            self._lock = self._lock_path(lock_path(self.path))
            self._listen_on_path(self.path)
        except OSError as error:
            self.close()
            raise ValueError(
                f"cannot listen on {self.address}: {error.strerror}; give a path in a folder that exists and is "
                "writable"
            ) from error
        return True

    def let_go(self) -> None:
        """Leave the address, with its files, to the process that has inherited the descriptors."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = self._inode = None

    def close(self) -> None:
        """Free the address and remove its files; idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._lock is not None and self.path is not None:
            for path in (self.path, lock_path(self.path)):
                with contextlib.suppress(OSError):
                    path.unlink()
            os.close(self._lock)
            self._lock = self._inode = None

    def _listen_on_path(self, path: Path) -> None:
        """Replace the socket file that a killed process may have left at the locked `path`."""
        self._socket = listen_at(path)
        self._inode = path.stat()

    def _listen_on_tcp(self) -> None:
        host, _, port = self.address.removeprefix("tcp://").rpartition(":")
        try:
            self._socket = listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("" if host == "*" else host, int(port)))
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        except OSError as error:
            self.close()
            raise ValueError(
                f"cannot listen on {self.address}: {error}; choose another address, or stop the process that uses this "
                "one"
            ) from error
        self.address = f"tcp://{host}:{listener.getsockname()[1]}"

    def _lock_path(self, file: Path) -> int:
        """Return a descriptor of the locked `file`, which holds the pid of this process.

        Raises ValueError if another process holds the lock or the file is not this user's own, and OSError if it cannot
        be opened.
        """
        deadline = time.monotonic() + _ORPHAN_TIMEOUT_S
        for _ in range(_MAX_LOCK_TRIES):
            owner = None
            lock = open_own_file(file)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                owner = os.read(lock, 32).decode("ascii", "replace").strip()
                os.close(lock)
                if _is_running(owner) or time.monotonic() > deadline:
                    raise ValueError(
                        f"{self.address} is already served by process {owner or 'unknown'}; choose another address, "
                        "or stop that process"
                    ) from error
                time.sleep(_ORPHAN_POLL_S)  # the owner was killed, and its core is about to end
                continue
            with contextlib.suppress(OSError):
                # A lock on a file that its last owner has just removed would exclude no other process.
                if os.path.samestat(os.fstat(lock), file.stat()):
                    _write_owner(lock)
                    return lock
            os.close(lock)
        raise ValueError(f"cannot lock {file}: it keeps changing; choose another folder")


def listen_at(path: Path) -> socket.socket:
    """Return a socket that listens at `path`, for this user only; a socket file that is there is replaced.

    Raises OSError if it cannot listen there.
    """
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listener.fileno(), 0o600)  # the file has this mode from the first moment
        listener.bind(os.fspath(path))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def check_address(address: str, key_file: str | None) -> None:
    """Raise ValueError, with the remedy, if no core can have this address, or if it needs a key file."""
    kind, _, endpoint = address.partition("://")
    if kind == "ipc" and endpoint:
        if endpoint.startswith(("@", "*")):
            raise ValueError(f"address {address!r} must name a path: ipc:///PATH/TO/SOCKET")
        if len(os.fsencode(endpoint)) > zmq.IPC_PATH_MAX_LEN:
            raise ValueError(
                f"the path of {address} is longer than {zmq.IPC_PATH_MAX_LEN} bytes, the limit of Unix sockets; choose "
                "a shorter path"
            )
    elif kind == "tcp":
        host, _, port = endpoint.rpartition(":")
        if not host or not re.fullmatch(r"\d{1,5}", port, re.ASCII) or int(port) > _MAX_PORT:
            raise ValueError(
                f"{address!r} is not a TCP address; give tcp://HOST:PORT with a port from 0 to {_MAX_PORT}"
            )
        if key_file is None:
            raise ValueError(
                f"{address} is a TCP address, which needs keys: give --key-file FILE, made with `vllm-mp keys server "
                "FILE`"
            )
    else:
        raise ValueError(f"the address must be ipc:///PATH/TO/SOCKET or tcp://HOST:PORT, got {address!r}")


def _write_owner(lock: int) -> None:
    """Write the pid of this process into a lock file."""
    os.ftruncate(lock, 0)
    with contextlib.suppress(OSError):  # a full disk costs the pid, which only errors name
        os.pwrite(lock, str(os.getpid()).encode(), 0)


def _is_running(pid: str) -> bool:
    """Return whether `pid`, read from a lock file, may name a running process."""
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError, OverflowError):
        pass
    return True
