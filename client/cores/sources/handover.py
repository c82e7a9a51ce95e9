"""The handover of a shared core from the process that keeps it to another one, with its address, KV cache and streams.

The new process connects to a socket whose name follows from the address, and gets an `Offer` with descriptors. It says
when it has loaded the model; then the old process ends its core between two steps and sends an `Estate`. Once the new
core is ready, the new process says so. The old one alone decides, by a `Verdict`: it lets go and ends, or it goes on
with a core of its own, because the new process took too long, and the new process ends. The new core serves no client
before the verdict, so never do both serve. If either process ends, the other goes on.
"""

import contextlib
import hashlib
import logging
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from vllm_mp.core_link.core_launch import Predecessor
from vllm_mp.core_link.core_status import Suspension
from vllm_mp.errors import EngineStartError
from vllm_mp.requests.lora_request import AdapterRecord
from vllm_mp.wire import PROTOCOL_VERSION, SCHEMA

logger = logging.getLogger(__name__)

_MAX_DESCRIPTORS = 250
_POLL_S = 0.02
_TAKE_TIMEOUT_S = 30.0
"""Time from the end of the old core until the new one must be ready to serve."""
_PEER = struct.Struct("3i")
"""(process id, user id, group id) of SO_PEERCRED."""


class Offer(msgspec.Struct, kw_only=True):
    """What the old process keeps. With it come descriptors: the listening socket, the lock if any, the KV caches."""

    protocol: tuple[int, str] = (PROTOCOL_VERSION, SCHEMA)
    address: str
    incarnation: int
    """Of the core."""
    core_pid: int
    limits: dict[str, str] = {}
    """What both cores must have in common beside the files of the model: `model_limits` as text."""
    num_held: int
    """Number of descriptors of the address, which come first."""


class Ready(msgspec.Struct, tag=True):
    """The new process has loaded the model."""


class NextCore(msgspec.Struct, tag=True):
    """The old process has started another core meanwhile, after a death."""

    pid: int


class Estate(msgspec.Struct, tag=True, kw_only=True):
    """What the core has left, for its successor."""

    predecessor: Predecessor
    suspension: Suspension
    adapters: list[AdapterRecord] | None
    tried: list[bytes]
    """Digests of the constraints that need no trial."""


class Taken(msgspec.Struct, tag=True):
    """The new core is ready, and waits for the verdict."""


class Verdict(msgspec.Struct, tag=True):
    """The last word of the old process, which decides who serves."""

    lets_go: bool
    """The new core serves, and the old process ends; False: the old process goes on with a core of its own."""


class Heir:
    """The new process, as the old one sees it."""

    def __init__(self, connection: socket.socket, offer: Offer, descriptors: Sequence[int]) -> None:
        """Send the offer. Raises OSError if the process is gone, or belongs to another user."""
        self.pid, user = _peer(connection)
        if user not in (0, os.getuid()):
            raise PermissionError(f"process {self.pid} of user {user} may not take over")
        self._channel = _Channel(connection)
        self._core_pid = offer.core_pid
        self._is_ready = False
        self._has_let_go = False
        socket.send_fds(connection, [msgspec.json.encode(offer) + b"\n"], list(descriptors))

    def is_ready(self, core_pid: int) -> bool:
        """Return whether the process has loaded the model; tell it if the core that it is to replace is another one.

        Raises OSError if it is gone.
        """
        if core_pid != self._core_pid:
            self._core_pid = core_pid
            self._channel.send(NextCore(core_pid))
        if not self._is_ready and self._channel.has_news(0):
            self._channel.receive(Ready, _TAKE_TIMEOUT_S)
            self._is_ready = True
        return self._is_ready

    def take(self, estate: Estate) -> bool:
        """Hand over what the core has left; return whether the next core serves there, and not here.

        No core serves there before this process has said that it lets go.
        """
        try:
            self._channel.send(estate)
            self._channel.receive(Taken, _TAKE_TIMEOUT_S)
            self._channel.send(Verdict(lets_go=True))
        except OSError as error:
            logger.warning("process %d does not take over: %s", self.pid, error)
            return False
        self._has_let_go = True
        return True

    def close(self) -> None:
        """Take leave of the process, which must give way unless it has taken over."""
        if not self._has_let_go:
            with contextlib.suppress(OSError):
                self._channel.send(Verdict(lets_go=False))
        self._channel.close()


class Inheritance:
    """The old process, as the new one sees it."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        """Receive the offer. Raises EngineStartError if none comes that this version understands."""
        self._channel = _Channel(connection)
        self.descriptors: list[int] = []
        """Those that came with the offer."""
        try:
            self.offer: Offer = self._channel.receive(Offer, _TAKE_TIMEOUT_S, self.descriptors)
        except OSError as error:
            self.close()
            raise EngineStartError(f"the engine at {address} does not let this process take over: {error}") from error
        self.core_pid = self.offer.core_pid
        """Process id of the latest core of the old process."""
        if self.offer.protocol != (PROTOCOL_VERSION, SCHEMA):
            self.close()
            raise EngineStartError(
                f"the engine at {address} is of another version of vllm-mp, whose clients this one cannot serve; "
                "stop it first, and start this one without --takeover"
            )

    def claim(self, check: Callable[[], None]) -> Estate | None:
        """Say that the model is loaded; return what the old core has left, None if its process has ended without.

        `check` is called meanwhile. Raises EngineStartError if that process goes on, and what `check` raises.
        """
        with contextlib.suppress(OSError):  # the other end is closed: what it has sent before says why
            self._channel.send(Ready())
        while isinstance(message := self._next(check), NextCore):
            self.core_pid = message.pid
        if message is None:
            logger.warning("the engine at %s ended before its core was taken over", self.offer.address)
        if isinstance(message, Verdict):
            raise EngineStartError(
                f"the engine at {self.offer.address} goes on, because its core is being replaced already, or this "
                "process took too long; start this one again"
            )
        return message

    def confirm(self, check: Callable[[], None]) -> None:
        """Say that the new core is ready, and return once the old process has let go or ended.

        This takes as long as the old process is stopped, because it may yet decide either way; `check` is called
        meanwhile. Raises EngineStartError if it has taken its core back, and what `check` raises.
        """
        with contextlib.suppress(OSError):
            self._channel.send(Taken())
        message = self._next(check)
        # At its end without a verdict there is no core of the old process: that ended before the estate came.
        if message is not None and not (isinstance(message, Verdict) and message.lets_go):
            raise EngineStartError(
                f"the engine at {self.offer.address} has taken its core back and goes on, because this process was "
                f"not ready within {_TAKE_TIMEOUT_S:g} s after the end of that core; start this one again"
            )
        self.close()

    def _next(self, check: Callable[[], None]) -> "Estate | NextCore | Verdict | None":
        """Return the next message; None if the old process has ended. Raises EngineStartError if it is none of these.

        `check` is called meanwhile.
        """
        while not self._channel.has_news(_POLL_S):
            check()
        try:
            message: Estate | NextCore | Verdict = self._channel.receive(Estate | NextCore | Verdict, _TAKE_TIMEOUT_S)
        except ConnectionResetError:
            return None
        except OSError as error:
            raise EngineStartError(f"the engine at {self.offer.address} cannot be taken over: {error}") from error
        return message

    def close(self) -> None:
        """Let the old process go on, unless it has let go; idempotent."""
        self._channel.close()


def listen_for_heirs(address: str) -> socket.socket | None:
    """Return a socket at which another process can ask to take over the core at `address`; None while there is one."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_name(address))
    except OSError:
        listener.close()
        return None
    listener.listen(1)
    listener.setblocking(False)
    return listener


def ask_to_take_over(address: str) -> Inheritance | None:
    """Return what the process offers that keeps a core at `address`; None if no process of this user does.

    Raises EngineStartError as `Inheritance` does.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(_name(address))
    except OSError:
        connection.close()
        return None
    if _peer(connection)[1] != os.getuid():
        connection.close()
        return None
    return Inheritance(connection, address)


def _name(address: str) -> bytes:
    """Return the name of the socket, which is no file and so ends with its process."""
    if address.startswith("ipc://"):
        address = f"ipc://{Path(address.removeprefix('ipc://')).resolve()}"
    return b"\0vllm_mp-" + hashlib.sha256(f"{os.getuid()} {address}".encode()).hexdigest().encode()


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id of the other end."""
    pid, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, user


class _Channel:
    """A connection on which messages are lines."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._unread = b""

    def send(self, message: msgspec.Struct) -> None:
        """Send a message. Raises OSError if the other end is gone, or has not read it in time."""
        self._connection.settimeout(_TAKE_TIMEOUT_S)
        self._connection.sendall(msgspec.json.encode(message) + b"\n")

    def has_news(self, timeout: float) -> bool:
        """Return whether there is a message or an end, after `timeout` seconds at the latest."""
        return bool(self._unread or select.select([self._connection], [], [], timeout)[0])

    def receive(self, kind: Any, timeout: float, descriptors: list[int] | None = None) -> Any:
        """Return the next message, which is of the type `kind`; add descriptors that come with it to `descriptors`.

        Raises ConnectionResetError if the other end is gone, and another OSError if it says something else, or nothing
        for `timeout` seconds.
        """
        self._connection.settimeout(timeout)
        while b"\n" not in self._unread:
            if descriptors is None:
                chunk = self._connection.recv(2**16)
            else:
                chunk, received, _, _ = socket.recv_fds(self._connection, 2**16, _MAX_DESCRIPTORS)
                descriptors += received
            if not chunk:
                raise ConnectionResetError("the other process has ended")
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            return msgspec.json.decode(line, type=kind)
        except msgspec.DecodeError as error:
            raise ConnectionAbortedError(f"the other process says something else: {error}") from error

    def close(self) -> None:
        self._connection.close()


def wait_until(is_so: Callable[[], bool], check: Callable[[], None], timeout: float, what: str) -> None:
    """Return once `is_so()`; call `check` meanwhile. Raises EngineStartError with `what` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not is_so():
        check()
        if time.monotonic() > deadline:
            raise EngineStartError(f"{what} within {timeout:g} s")
        time.sleep(_POLL_S)
