"""The client's socket to a core, driven by whatever event loop is running."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from vllm_mp import wire
from vllm_mp.config import VllmConfig
from vllm_mp.curve_key import read_key_file
from vllm_mp.errors import EngineStartError

logger = logging.getLogger(__name__)

_POLL_MS = 50
_HEARTBEAT_MS = 5000


class CoreConnection:
    """A DEALER socket to one core.

    It is made, and greets the core, without an event loop. `attach` hands it to a running loop, later also to another
    one; messages that arrive while no loop runs wait in the socket.
    """

    def __init__(self, address: str, key_file: str | None = None) -> None:
        keys = None
        if address.startswith("tcp://"):
            if key_file is None:
                raise ValueError(f"{address} is a TCP address, which needs key_file=, a copy of the core's key file")
            keys = read_key_file(key_file)
        elif not address.startswith("ipc://"):
            raise ValueError(f"address {address!r} must begin with ipc:// or tcp://")
        self.address = address
        self.num_dropped = 0
        self.incarnation = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watched: dict[int, Callable[[], None]] = {}
        self._receive: Callable[[], None] = lambda: None
        self._owner = os.getpid()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
        if keys is not None:
            public, secret = keys
            self._socket.curve_serverkey = self._socket.curve_publickey = public
            self._socket.curve_secretkey = secret
            # A peer that vanishes without closing the connection is only found out by asking.
            self._socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
            self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * _HEARTBEAT_MS)
        self.monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        """Readable when the connection has broken; for one thread, which may be another than that of the loop."""
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"cannot connect to {address}: {error.strerror}; check the address") from error

    def greet(self, timeout: float, check: Callable[[], None]) -> tuple[wire.Welcome, VllmConfig]:
        """Say hello and wait for the core's welcome, which comes when it can serve.

        `check` is called twenty times a second and raises when waiting is pointless. Raises EngineStartError when the
        core refuses, speaks another protocol, or has not answered after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        hello = wire.encode(wire.hello())
        self._socket.send(hello)
        while True:
            if self.is_broken():  # a core that died while it loaded: what serves the address next has not been greeted
                self._socket.send(hello)
            if self._socket.poll(_POLL_MS):
                try:
                    message = wire.decode_core_message(self._socket.recv())
                except (ValueError, RecursionError) as error:
                    raise EngineStartError(f"what answers at {self.address} is not a core: {error}") from error
                if isinstance(message, wire.Welcome):
                    return message, self._accept(message)
                if isinstance(message, wire.Refused):
                    raise EngineStartError(message.reason)
            check()
            if time.monotonic() > deadline:
                raise EngineStartError(f"the core at {self.address} did not answer within {timeout:g} s")

    def _accept(self, welcome: wire.Welcome) -> VllmConfig:
        if reason := wire.mismatch(welcome):
            raise EngineStartError(f"{reason}; the address is {self.address}")
        self.incarnation = welcome.incarnation
        try:
            return msgspec.json.decode(welcome.config, type=VllmConfig)
        except (ValueError, RecursionError) as error:
            raise EngineStartError(
                f"the configuration of the core at {self.address} cannot be read: {error}"
            ) from error

    def is_broken(self) -> bool:
        """Whether the connection has broken since the last call."""
        broken = False
        while not self.monitor.closed and self.monitor.poll(0):
            recv_monitor_message(self.monitor)
            broken = True
        return broken

    def send(self, message: wire.ClientMessage) -> None:
        """Send, from the loop's thread; raises ValueError for a message that is too large for the core."""
        self._socket.send(wire.encode_bounded(message), zmq.NOBLOCK)
        # Sending may swallow the wake-up that announced a message, as the descriptor speaks only of changes.
        if self._loop is not None and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._receive)

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop that the connection is attached to."""
        return self._loop

    def attach(
        self,
        on_message: Callable[[wire.CoreMessage], None],
        news_fd: int,
        on_news: Callable[[], None],
    ) -> None:
        """Deliver to `on_message` on the running loop, taking over from an earlier one that runs no more.

        `on_news` is called when the descriptor `news_fd` is readable. Raises RuntimeError if the loop that the
        connection is attached to runs in another thread.
        """
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        if self._loop is not None and self._loop.is_running():
            raise RuntimeError(
                "this engine is in use by an event loop in another thread; call it from there "
                "(asyncio.run_coroutine_threadsafe), or make an engine for each loop"
            )
        self.detach()

        def receive() -> None:
            while not self._socket.closed:
                try:
                    frame = self._socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    return
                except zmq.ZMQError as error:
                    if error.errno not in (zmq.ENOTSOCK, zmq.ETERM):
                        raise
                    return  # closed by another thread, at the end of the interpreter
                message = self._decode(frame)
                try:
                    if message is not None:
                        on_message(message)
                except Exception as error:
                    # Whatever is wrong with one message, those behind it are somebody's answer.
                    self._drop("it could not be handled", error)

        self._loop = loop
        self._receive = receive
        self._watched = {int(self._socket.getsockopt(zmq.FD)): receive, news_fd: on_news}
        for descriptor, callback in self._watched.items():
            loop.add_reader(descriptor, callback)
        # What came before the loop looked announces itself no more.
        loop.call_soon(receive)

    def drain(self) -> None:
        """Deliver what has arrived, where the loop has not got round to it."""
        if self._loop is not None:
            self._receive()

    def detach(self) -> None:
        """Leave the loop; from any thread, but not from a process that was forked off the one that attached."""
        loop, self._loop = self._loop, None
        watched, self._watched = self._watched, {}
        if loop is None or loop.is_closed() or os.getpid() != self._owner:
            return
        for descriptor in watched:
            run_on(loop, loop.remove_reader, descriptor)

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket, giving what is under way `linger_ms` milliseconds; idempotent."""
        if os.getpid() != self._owner:
            return  # a forked child has no threads to close it with
        self.detach()
        if not self._socket.closed:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.disable_monitor()
            self.monitor.close(linger=0)
            self._socket.close(linger=linger_ms)
            self._context.term()

    def _decode(self, frame: bytes) -> wire.CoreMessage | None:
        try:
            message = wire.decode_core_message(frame)
        except (ValueError, RecursionError) as error:
            self._drop(str(error))
            return None
        if not isinstance(message, wire.Refused) and message.incarnation != self.incarnation:
            self.num_dropped += 1
            return None
        return message

    def _drop(self, why: str, cause: Exception | None = None) -> None:
        self.num_dropped += 1
        # Powers of two, so that a flood of garbage does not flood the log.
        if self.num_dropped & (self.num_dropped - 1) == 0:
            logger.warning(
                "dropped a message from the core that is not of the protocol (%d so far): %.500s",
                self.num_dropped,
                why,
                exc_info=cause,
            )


def run_on(loop: asyncio.AbstractEventLoop, call: Callable[..., Any], *args: Any) -> None:
    """Run `call(*args)` now, or soon on `loop` if that runs in another thread."""
    if loop.is_running() and asyncio._get_running_loop() is not loop:
        loop.call_soon_threadsafe(call, *args)
    else:
        call(*args)
