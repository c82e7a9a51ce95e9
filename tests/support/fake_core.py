"""A core that says what a test wants, for the side of the client."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import zmq

from vllm_mp import wire
from vllm_mp.config import VllmConfig

INCARNATION = 3


class FakeCore:
    """Says hello with any configuration, and answers calls with any answer, in a thread of its own."""

    def __init__(
        self,
        address: str,
        config: VllmConfig,
        answers: Mapping[str, Callable[..., Any]] | None = None,
        socket: "zmq.Socket[bytes] | None" = None,
    ) -> None:
        """`socket` is a bound ROUTER; without it, one is bound to `address`. `close` closes it."""
        self._config, self._answers = config, answers or {}
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = socket or self._context.socket(zmq.ROUTER)
        if socket is None:
            self._socket.bind(address)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._is_closed.is_set():
            if self._socket.poll(20):
                identity, frame = self._socket.recv_multipart()
                if (answer := self._answer(wire.decode_client_message(frame))) is not None:
                    self._socket.send_multipart((identity, wire.encode(answer)))

    def _answer(self, message: wire.ClientMessage) -> wire.CoreMessage | None:
        if isinstance(message, wire.Hello):
            return wire.welcome(INCARNATION, 0, 1, msgspec.json.encode(self._config))
        if isinstance(message, wire.Call):
            return wire.Reply(INCARNATION, message.call_id, self._answers[message.name](*message.args))
        return None
