"""The loop of a replay core: receive, step, wait for the time or the consumer."""

import contextlib
import os
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import zmq

from vllm_mp import wire
from vllm_mp.config import VllmConfig
from vllm_mp.core_link.core_status import CoreState
from vllm_mp.core_link.status_page import StatusPage
from vllm_mp.model_store.tokenizer_files import LIST_CALL, READ_CALL, TokenizerFiles
from vllm_mp.replay_core.answers import Answers
from vllm_mp.replay_core.streams import Streams
from vllm_mp.validation.call_validation import check_pause
from vllm_mp.validation.request_validation import validate_generation

_BEAT_MS = 500
"""Interval of the heartbeats without work."""
_SPIN_S = 20e-6
"""Pause between two looks at the counter of a consumer that sets the pace."""


class Pace(NamedTuple):
    """When the next step is due."""

    rate: float = 0.0
    """Steps per second, hence tokens per second of each request; 0: as fast as possible."""
    taken: "npt.NDArray[np.uint64] | None" = None
    """[1], in memory that the consumer shares: the number of steps that it has taken. Step n is due when the consumer
    has taken n - `ahead` steps. None: the consumer is not asked."""
    ahead: int = 1


class ReplayCore:
    """Serves clients on a ROUTER socket until the process is told to stop."""

    def __init__(
        self, socket: "zmq.Socket[bytes]", config: VllmConfig, incarnation: int, page: StatusPage, pace: Pace
    ) -> None:
        self._socket = socket
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._config = config
        self._incarnation = incarnation
        self._page = page
        self._pace = pace
        self._answers = Answers()
        self._clients: dict[bytes, Streams] = {}
        """The requests of each client, by the identity that the socket gives it."""
        self._num_clients = 0
        """Number of clients that ever said hello."""
        self._step = 0
        self._num_dropped = 0
        self._is_paused = False
        self._due = 0.0
        """Time of the next step, in seconds of `time.perf_counter()`."""
        tokenizer_files = TokenizerFiles(config.model_config.tokenizer)
        self._calls: dict[str, Callable[..., Any]] = {
            "ping": lambda: None,
            "status": self.status,
            LIST_CALL: tokenizer_files.sizes,
            READ_CALL: tokenizer_files.read,
            "reset_prefix_cache": lambda *_: None,
            "pause": self._begin_pause,
            "resume": self._end_pause,
        }

    def run(self) -> None:
        """Serve until an exception, such as that of a signal handler."""
        self._note_state()
        while True:
            while self._receive():
                pass
            if self._is_paused or not any(self._clients.values()):
                self._note_state()
                self._poller.poll(_BEAT_MS)
                self._page.beat()
            elif (wait := self._time_until_due()) > 0:
                self._poller.poll(max(1, round(1000 * wait))) if wait >= 1e-3 else time.sleep(min(wait, _SPIN_S))
            else:
                self._run_step()

    def status(self) -> dict[str, Any]:
        """Return what a core's operation "status" does."""
        blocks = self._config.cache_config.num_blocks
        num_running = sum(map(len, self._clients.values()))
        return {
            "pid": os.getpid(),
            "step": self._step,
            "num_running": 0 if self._is_paused else num_running,
            "num_waiting": num_running if self._is_paused else 0,
            "num_preemptions": 0,
            "free_blocks": max(0, blocks - num_running),
            "total_blocks": blocks,
            "is_paused": self._is_paused,
            "is_sleeping": False,
            "sleep_level": 0,
            "num_found_blocks": 0,
            "num_recomputed_tokens": 0,
            "num_blocks_from_file": 0,
            "num_late_graphs": 0,
            "num_dropped_messages": self._num_dropped,
            "num_clients": len(self._clients),
            "rank_pids": [os.getpid()],
            "rank_nodes": [0],
            "node_names": [socket.gethostname()],
        }

    def _time_until_due(self) -> float:
        """Return the seconds until the next step; above 0 also while the consumer has not taken enough steps."""
        if self._pace.taken is not None and self._step - int(self._pace.taken[0]) >= self._pace.ahead:
            return _SPIN_S
        return self._due - time.perf_counter() if self._pace.rate else 0.0

    def _run_step(self) -> None:
        self._step += 1
        for identity, streams in list(self._clients.items()):
            if streams:
                self._send(identity, streams.step(self._incarnation, self._step))
        if self._pace.rate:
            # A core that falls behind its rate does not catch up in a burst.
            self._due = max(self._due + 1 / self._pace.rate, time.perf_counter())
            self._note_state()
        elif self._step % 256 == 0:
            self._note_state()

    def _receive(self) -> bool:
        """Handle a message, if there is any; return whether there was. A message that is invalid is dropped."""
        if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return False
        identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
        try:
            message = wire.decode_client_message(b"".join(frames))
        except wire.DECODE_ERRORS:
            self._num_dropped += 1
            return True
        streams = self._clients.get(identity)
        if isinstance(message, wire.Hello):
            self._greet(identity, message)
        elif streams is None or message.incarnation != self._incarnation:
            self._num_dropped += 1
        elif isinstance(message, wire.AddRequest | wire.AddPooling):
            self._add(identity, streams, message)
        elif isinstance(message, wire.AbortRequests):
            self._send_ends(identity, streams.abort(message.slots))
        elif isinstance(message, wire.Call):
            self._call(identity, message)
        elif isinstance(message, wire.Bye):
            del self._clients[identity]
        return True

    def _greet(self, identity: bytes, hello: wire.Hello) -> None:
        if reason := wire.mismatch(hello):
            self._send(identity, wire.Refused(reason))
            return
        if identity not in self._clients:
            self._clients[identity] = Streams(self._answers)
            self._num_clients += 1
        config = msgspec.json.encode(self._config)
        self._send(identity, wire.welcome(self._incarnation, self._num_clients - 1, os.getpid(), config))

    def _add(self, identity: bytes, streams: Streams, message: wire.AddRequest | wire.AddPooling) -> None:
        """Begin to answer a request, or refuse it as a core does."""
        slot = message.slot
        if slot in streams or not 0 <= slot < wire.MAX_LIVE_REQUESTS:
            self._num_dropped += 1  # the slot belongs to another request, so no answer is possible
            return
        position = len(message.output) // 4 if isinstance(message, wire.AddRequest) else 0
        try:
            if isinstance(message, wire.AddPooling):
                raise NotImplementedError("a replay core has no vectors; connect to a core with a model")
            if message.params.prompt_logprobs is not None:
                raise NotImplementedError(
                    "a replay core has no log-probabilities of prompts; connect to a core with a model"
                )
            prompt, output = wire.unpack_ids(message.prompt), wire.unpack_ids(message.output)
            total = validate_generation(
                message.request_id, prompt, output, message.params, message.bad_words, self._config
            )
            model = self._config.model_config
            answer = self._answers.choose(
                prompt, message.params, total - len(prompt), model.eos_token_ids, model.unnamed_eos_token_id
            )
            if position >= answer.length:
                raise ValueError(f"the completion has ended: it has {position} tokens, the answer {answer.length}")
        except Exception as error:  # no request may end the core
            self._send_ends(identity, [wire.Finished(slot, position, "error", error=str(error)[:2000])])
            return
        streams.add(slot, answer, position, message.params.logprobs)

    def _call(self, identity: bytes, message: wire.Call) -> None:
        call = self._calls.get(message.name)
        try:
            if call is None:
                known = ", ".join(sorted(self._calls))
                raise ValueError(f"a replay core has no operation {message.name[:100]!r}; it has {known}")
            result, error = call(*message.args), None
        except (ValueError, TypeError) as caught:
            result, error = None, str(caught)
        self._send(identity, wire.Reply(self._incarnation, message.call_id, result, error))

    def _begin_pause(self, mode: Any, clear_cache: Any) -> None:
        """Hold all requests back, or with mode "abort" end them. Raises ValueError for the mode "wait"."""
        check_pause(mode, clear_cache)
        if mode == "wait":
            raise ValueError("a replay core cannot pause with mode 'wait'; use 'keep' or 'abort'")
        self._is_paused = True
        if mode == "abort":
            for identity, streams in list(self._clients.items()):
                self._send_ends(identity, streams.abort_all())

    def _end_pause(self) -> None:
        self._is_paused = False

    def _send_ends(self, identity: bytes, ends: list[wire.Finished]) -> None:
        if ends:
            self._send(identity, wire.StepOutput(self._incarnation, 0, b"", b"", b"", finished=ends))

    def _send(self, identity: bytes, message: wire.CoreMessage) -> None:
        """Send `message`; forget the client if it is gone."""
        try:
            self._socket.send_multipart((identity, wire.encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._clients.pop(identity, None)

    def _note_state(self) -> None:
        """Write the load to the status page."""
        status = self.status()
        self._page.end_step(status["num_running"], status["num_waiting"], status["free_blocks"], status["total_blocks"])


def serve(address: str, config: VllmConfig, pace: Pace) -> None:
    """Serve clients at `address`, ipc://PATH, until an exception; remove the socket and the status page then.

    Raises ValueError, naming the address, if it cannot be bound.
    """
    if not address.startswith("ipc://"):
        raise ValueError(f"--listen must be ipc:///PATH/TO/SOCKET, got {address!r}")
    path = address.removeprefix("ipc://")
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
        socket.setsockopt(option, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
    incarnation = int(1000 * time.time())
    page = StatusPage.create(f"{path}.status", incarnation)
    try:
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ValueError(
                f"cannot listen on {address}: {error.strerror}; give a path in a writable folder"
            ) from error
        os.chmod(path, 0o600)
        page.enter(CoreState.IDLE)
        ReplayCore(socket, config, incarnation, page, pace).run()
    finally:
        socket.close(linger=200)
        context.term()
        for file in (path, f"{path}.status"):
            with contextlib.suppress(OSError):
                os.unlink(file)
