"""The client's socket to one core, driven by the running event loop.

`CoreConnection` sends and receives messages, and ends with its core. `EngineCoreClient` (in `core_client.py`) keeps the
requests and calls that must be sent again to the next core.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from vllm_mp import wire
from vllm_mp.client.cores.endpoint import name_trouble
from vllm_mp.client.cores.socket_owner import check_peer
from vllm_mp.config import VllmConfig
from vllm_mp.errors import EngineStartError
from vllm_mp.keys.curve_keys import read_client_key
from vllm_mp.machine.file_owner import trusted_owners

logger = logging.getLogger(__name__)

_MAX_RECONNECT_MS = 3000
"""Longest pause between two attempts to connect over TCP; the first is 0.1 s."""
_POLL_MS = 50
"""Time between two calls of the check while a core is greeted."""
_RECEIVE_S = 0.001
"""Time after which no further message is received before other callbacks of the event loop have run."""
_HANDOVER_TIMEOUT_S = 5.0
"""Time that an event loop in another thread has to run a call."""
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
"""As numbers, because enums take longer to combine."""


def is_engine_running(address: str) -> str:
    """Return the remedy of an error that says that no core answers at `address`."""
    return f"is the engine running? (vllm-mp engine --listen {address})"


class CoreConnection:
    """A DEALER socket to one core.

    Constructing it and greeting the core need no event loop. `attach` hands the socket to the running loop, and may
    later hand it to another; messages that arrive while no loop runs wait in the socket.
    """

    def __init__(
        self,
        address: str,
        key_file: str | None = None,
        operator_key: bytes = b"",
        token: bytes = b"",
        owners: Collection[int] | None = None,
    ) -> None:
        """Connect to `address`, ipc://PATH or tcp://HOST:PORT; the latter needs `key_file`, a key file of a client.


        `operator_key` is that of the core, if this client is to be its operator. `token` is the client's, by which a
        core knows it again. `owners` are the user ids that a core behind a Unix socket may have, by default this user's
        and root's.

        Raises ValueError, naming the address or the key file, if either is unusable.
        """
        key = None
        if address.startswith("tcp://"):
            if key_file is None:
                raise ValueError(
                    f"key_file is missing for the TCP address {address}; make one with `vllm-mp keys client`"
                )
            key = read_client_key(key_file)
        elif not address.startswith("ipc://"):
            raise ValueError(f"the address must be ipc:///PATH/TO/SOCKET or tcp://HOST:PORT, got {address!r}")
        self.address = address
        self._owners = trusted_owners() if owners is None else owners
        self._key_file = key_file
        self._refusal = ""
        """Why the core does not admit this client; empty if it has not refused."""
        self._handshake_failure = ""
        """What to check if the core does not answer, after a handshake that failed."""
        self._operator_key = operator_key
        self._token = token
        self._dropped = wire.DropCounter(logger, "the core")
        """Messages from the core that were invalid or from another incarnation."""
        self.incarnation = 0
        """The incarnation of the greeted core; 0 before."""
        self.was_paused = False
        """The core was paused when it was greeted, or last asked."""
        self.model = wire.NO_DIGEST
        """What the core has loaded, as far as it has told; `NO_DIGEST`: no weights."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watched: dict[int, Callable[[], None]] = {}
        """The callback for each file descriptor that the loop watches."""
        self._receive: Callable[[], bool] = lambda: True
        """Delivers the messages that have arrived, as many as a turn of the loop has time for; the rest in later turns.
        Returns whether there is no rest."""
        self._receives_soon = False
        """The loop is about to call `_receive_some`."""
        self._owner = os.getpid()
        """The process that may close the socket; a forked child may not."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, 0)  # a core accepts connections once it has loaded its model
        if key is not None:
            self._socket.curve_serverkey = key.server
            self._socket.curve_publickey, self._socket.curve_secretkey = key.public, key.secret
            # Only heartbeats show that a peer vanished without closing the connection.
            self._socket.setsockopt(zmq.HEARTBEAT_IVL, wire.TCP_HEARTBEAT_MS)
            self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * wire.TCP_HEARTBEAT_MS)
            self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS)
            self._socket.setsockopt(zmq.TCP_MAXRT, 3 * wire.TCP_HEARTBEAT_MS)  # before the first heartbeat
        self.monitor = self._socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )
        """Readable when the connection has broken. Only one thread may use it, which need not be the loop's."""
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"cannot connect to {address}: {error.strerror}; check the address") from error

    def greet(
        self, timeout: float, check: Callable[[], None], progress: Callable[[], object] = lambda: None
    ) -> tuple[wire.Welcome, VllmConfig]:
        """Send `Hello`, wait until the core can serve, and return its `Welcome` and its configuration.

        `check` is called 20 times a second and raises when waiting is pointless. The result of `progress` changes while
        the core gets on with its load. Raises what `check` raises, and EngineStartError if the peer is no core of this
        version, refuses, or has neither answered nor got on within `timeout` seconds.
        """
        deadline, latest = time.monotonic() + timeout, progress()
        hello = wire.encode(wire.hello(self._operator_key, self._token))
        self._send_or_raise(hello)
        while True:
            is_broken = self.is_broken()
            if self._refusal:
                raise EngineStartError(self._refusal)
            self._check_address()
            if is_broken:  # the core died while it loaded; greet the next core at this address
                self._send_or_raise(hello)
            if self._socket.poll(_POLL_MS):
                frame = self._socket.recv(copy=False)
                try:
                    message = wire.decode_core_message(frame.bytes)
                except wire.DECODE_ERRORS as error:
                    raise EngineStartError(
                        f"the peer at {self.address} is not a core: {error}; check the address"
                    ) from error
                # A welcome over a connection that has ended is worth nothing: the next core is greeted.
                if isinstance(message, wire.Welcome) and (
                    not self.address.startswith("ipc://") or check_peer(frame.get(zmq.SRCFD), self._owners)
                ):
                    return message, self._accept(message)
                if isinstance(message, wire.Refused):
                    raise EngineStartError(message.reason)
            check()
            if (seen := progress()) != latest:
                deadline, latest = time.monotonic() + timeout, seen
            if time.monotonic() > deadline:
                remedy = self._handshake_failure or name_trouble(self.address) or is_engine_running(self.address)
                raise EngineStartError(
                    f"the core at {self.address} did not answer within {round(timeout, 2):g} s; {remedy}"
                )

    def ask(self, timeout: float, name: str, *args: wire.CallArgument) -> Any:
        """Run an operation of the greeted core and return its result; blocks, and only before `attach`.

        Raises EngineStartError if the core refuses, ends, or has not answered within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        call_id = secrets.randbits(62)  # the core carries out a pause or a sleep once per id
        self._send_or_raise(wire.encode(wire.Call(self.incarnation, call_id, name, list(args))))
        while time.monotonic() < deadline and not self.is_broken():
            if self._socket.poll(_POLL_MS):
                message = self._decode(self._socket.recv())
                if isinstance(message, wire.Mark):  # else the core would take all later output for unread
                    self._send_or_raise(wire.encode(wire.MarkSeen(self.incarnation, message.mark)))
                elif isinstance(message, wire.PauseChanged):
                    self.was_paused = message.is_paused
                elif isinstance(message, wire.ModelChanged):
                    self.model = message.model
                elif isinstance(message, wire.Reply) and message.call_id == call_id:
                    if message.error is not None:
                        raise EngineStartError(f"the core at {self.address} refused {name}: {message.error}")
                    return message.result
        raise EngineStartError(
            f"the core at {self.address} did not answer {name} within {timeout:g} s, or ended; connect again"
        )

    def _accept(self, welcome: wire.Welcome) -> VllmConfig:
        """Take over the incarnation of `welcome` and return its configuration.

        Raises EngineStartError if the core is of another version or its configuration cannot be read.
        """
        if reason := wire.mismatch(welcome):
            raise EngineStartError(f"{reason}; the address is {self.address}")
        self.incarnation = welcome.incarnation
        self.was_paused, self.model = welcome.is_paused, welcome.model
        try:
            return msgspec.json.decode(welcome.config, type=VllmConfig)
        except wire.DECODE_ERRORS as error:
            raise EngineStartError(
                f"the configuration of the core at {self.address} cannot be read: {error}; install the same vllm-mp on "
                "both sides"
            ) from error

    def _send_or_raise(self, frame: bytes) -> None:
        """Send `frame` without waiting. Raises as `_check_address`."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            self._check_address()

    def _check_address(self) -> None:
        """Raise EngineStartError if ZeroMQ has given the address up, as after an answer in another protocol."""
        if self._socket.poll(0, zmq.POLLOUT):
            return
        self.is_broken()  # learns of a refusal
        raise EngineStartError(
            self._refusal
            or f"the peer at {self.address} is not a core: ZeroMQ's handshake with it fails; check the address"
        )

    def is_broken(self) -> bool:
        """Return whether the connection has broken since the last call."""
        broken = False
        while not self.monitor.closed and self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:  # ZeroMQ does not try again
                self._refusal = (
                    f"the core at {self.address} does not know the key in {self._key_file}, or it was revoked; its "
                    "operator can add it with `vllm-mp keys allow`"
                )
            elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._handshake_failure = (
                    "it ends the connection at once: check that the address is a core's, and that "
                    f"{self._key_file} was made with that core's public key"
                )
            else:
                broken = True
        return broken

    def send(self, message: wire.ClientMessage) -> None:
        """Send `message`; call this from the loop's thread. Raises ValueError if it is too large for the core."""
        self._socket.send(wire.encode_bounded(message), zmq.NOBLOCK)
        # The socket's descriptor signals changes only, and sending may consume the signal of a message that arrived.
        if self._loop is not None and not self._loop.is_closed() and self._has_message():
            self._receive_soon(self._loop)

    def _has_message(self) -> bool:
        return bool(self._socket.getsockopt(_EVENTS) & _POLLIN)  # type: ignore[operator]

    @property
    def num_dropped(self) -> int:
        """Messages that were dropped: invalid, or of another incarnation."""
        return self._dropped.num_dropped

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that the connection is attached to, if any."""
        return self._loop

    def is_attached(self) -> bool:
        """Return whether the connection is attached to the running loop. Raises RuntimeError without a loop."""
        return asyncio.get_running_loop() is self._loop

    def attach(
        self,
        on_message: Callable[[wire.CoreMessage], None],
        news_fd: int,
        on_news: Callable[[], None],
    ) -> None:
        """Deliver messages to `on_message` on the running loop, which replaces an earlier loop that has stopped.

        `on_news` is called when the file descriptor `news_fd` is readable. No-op if the connection is attached to the
        running loop already. Raises RuntimeError if it is attached to a loop that runs in another thread.
        """
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        if self._loop is not None and self._loop.is_running():
            raise RuntimeError(
                "this engine is in use by an event loop in another thread; call it from there "
                "(asyncio.run_coroutine_threadsafe), or create an engine for each loop"
            )
        self.detach()

        def receive() -> bool:
            end = time.monotonic() + _RECEIVE_S
            while not self._socket.closed:
                try:
                    if not self._has_message():  # costs less than the exception for a receive in vain
                        return True
                    frame = self._socket.recv(zmq.NOBLOCK)
                except zmq.ZMQError as error:
                    if error.errno not in (zmq.ENOTSOCK, zmq.ETERM):
                        raise
                    return True  # closed by another thread, at the end of the interpreter
                message = self._decode(frame)
                try:
                    if message is not None:
                        on_message(message)
                except Exception as error:
                    # A message that cannot be handled must not keep the next ones from their requests.
                    self._dropped.warn("it could not be handled", error)
                if time.monotonic() >= end:
                    # The socket's descriptor does not signal again what has arrived.
                    self._receive_soon(loop)
                    return False
            return True

        self._loop = loop
        self._receive = receive
        self._receives_soon = False
        self._watched = {int(self._socket.getsockopt(zmq.FD)): self._on_signal, news_fd: on_news}
        for descriptor, callback in self._watched.items():
            loop.add_reader(descriptor, callback)
        # Messages that arrived before the descriptor was watched are not signalled again.
        self._receive_soon(loop)

    def _on_signal(self) -> None:
        if not self._receives_soon:
            self._receive()

    def _receive_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        """Receive in the next turn of `loop`; at most one such call is scheduled, so that sending adds none."""
        if not self._receives_soon:
            self._receives_soon = True
            loop.call_soon(self._receive_some, loop)

    def _receive_some(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop is self._loop:  # else another loop, or none, receives
            self._receives_soon = False
            self._receive()

    def drain(self) -> bool:
        """Deliver the messages that have arrived, as many as a turn of the loop has time for.

        Return whether there is no rest, which is so if no loop is attached.
        """
        return self._loop is None or self._receive()

    def detach(self) -> None:
        """Leave the loop; may be called from any thread. A forked child does not touch its parent's loop."""
        loop, self._loop = self._loop, None
        watched, self._watched = self._watched, {}
        if loop is None or loop.is_closed() or os.getpid() != self._owner:
            return
        for descriptor in watched:
            run_on(loop, loop.remove_reader, descriptor)

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket, giving unsent messages `linger_ms` milliseconds; idempotent, no-op in a forked child."""
        if os.getpid() != self._owner:
            return  # a forked child has no ZeroMQ threads to close the socket with
        self.detach()
        if not self._socket.closed:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.disable_monitor()
            self.monitor.close(linger=0)
            self._socket.close(linger=linger_ms)
            self._context.term()

    def _decode(self, frame: bytes) -> wire.CoreMessage | None:
        """Return the message in `frame`; count it and return None if it is invalid or from another incarnation."""
        try:
            message = wire.decode_core_message(frame)
        except wire.DECODE_ERRORS as error:
            self._dropped.warn(str(error))
            return None
        if not isinstance(message, wire.Refused) and message.incarnation != self.incarnation:
            self._dropped.count()
            return None
        return message


def run_on(loop: asyncio.AbstractEventLoop, call: Callable[..., Any], *args: Any) -> None:
    """Run `call(*args)` now, or soon on `loop` if the loop runs in another thread."""
    if loop.is_running() and asyncio._get_running_loop() is not loop:
        loop.call_soon_threadsafe(call, *args)
    else:
        call(*args)


def run_on_and_wait(loop: asyncio.AbstractEventLoop | None, call: Callable[[], None]) -> None:
    """Do what `run_on` does, and wait up to `_HANDOVER_TIMEOUT_S` for the end of `call`; without a loop, run it now."""
    if loop is None:
        call()
        return
    done = threading.Event()

    def run() -> None:
        call()
        done.set()

    run_on(loop, run)
    done.wait(_HANDOVER_TIMEOUT_S)
