"""The ranks of other machines, as their core reaches them: through the rank host of each machine."""

import contextlib
import logging
import reprlib
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from vllm_mp.config import VllmConfig
from vllm_mp.config.nodes import ip_address, missing_node
from vllm_mp.core.parallel.messages import PROTOCOL, differences, shared_options
from vllm_mp.core.parallel.node_messages import (
    ANSWER,
    MAX_SAID_BYTES,
    MESSAGE,
    PROBE,
    Answer,
    Beats,
    FromHost,
    Hello,
    RanksFailed,
    Refused,
    Said,
    Started,
    Welcome,
)
from vllm_mp.core.parallel.rank_state import PATIENCE, RankState, WorkerFailedError
from vllm_mp.core.parallel.shared_memory import MemoryLayout
from vllm_mp.keys.curve_server import require_keys
from vllm_mp.version import __version__
from vllm_mp.wire import DECODE_ERRORS

logger = logging.getLogger(__name__)

_SILENCE_S: Final = 10.0
"""Time without a message after which a rank host is given up, or less with a low `engine_iteration_timeout_s`; it says
something every 0.5 s."""
_PROBE_S: Final = 1.0
"""Interval in which the core looks whether the connections still exist."""
_MAX_MESSAGES: Final = 100
"""Messages that the core reads at a time, so that no flood of them holds up its steps."""
_MAX_REFUSALS_LOGGED: Final = 64
"""Number of refusals that the log names, so that no flood of them fills it."""
_READ_S: Final = 0.1
"""Interval in which a core that only sends reads too."""


class _Node:
    """Another machine, and its rank host once that has been admitted."""

    def __init__(self, number: int, ranks: Sequence[int], layout: MemoryLayout) -> None:
        self.number = number
        self.identity: bytes | None = None
        """The connection of the rank host; None before there is one."""
        self.machine = ""
        self.heard = 0.0
        self.ranks = [RankState(rank, layout.stage_of(rank), f"node {number}") for rank in ranks]

    @property
    def name(self) -> str:
        return f"node {self.number} ({self.machine})" if self.machine else f"node {self.number}"

    def admit(self, identity: bytes, machine: str) -> None:
        self.identity, self.machine, self.heard = identity, machine, time.monotonic()
        for state in self.ranks:
            state.node = f"node {self.number}, {machine}"


class NodeRanks:
    """The ranks behind rank hosts; it is a `vllm_mp.core.parallel.rank_state.RankSource`.

    A rank host that has been admitted and then ends, loses its connection, says what no rank host says, or says nothing
    for some seconds is the end of the core: `receive` raises WorkerFailedError.
    """

    def __init__(self, config: VllmConfig, meeting_place: str) -> None:
        """Let rank hosts connect at `master_addr` and `master_port` with their keys.

        Raises ValueError, with the remedy, if they cannot, or if the key file of this machine cannot be read.
        """
        parallel = config.parallel_config
        self._config = config
        self._options = shared_options(config)  # the core completes `config` later
        self._meeting_place = meeting_place
        layout = MemoryLayout.of(config)
        self._nodes = [_Node(number, parallel.ranks_of(number), layout) for number in range(1, parallel.nnodes)]
        self.ranks = [state for node in self._nodes for state in node.ranks]
        limits = config.liveness_config
        self._wait_s = PATIENCE * limits.start_timeout_s
        self._silence_s = min(_SILENCE_S, PATIENCE * limits.engine_iteration_timeout_s)
        self._deadline = time.monotonic() + self._wait_s
        self._probed = self._read = 0.0
        self._num_refusals = 0
        """Number of refusals that the log has named so far."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a message to a rank host that has gone raises
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_SAID_BYTES)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._authenticator: ThreadAuthenticator | None = None
        try:
            self._authenticator = require_keys(self._socket, parallel.node_key_file)
            self._listen(parallel.master_addr, parallel.master_port)
        except BaseException:
            self.close()
            raise

    @property
    def descriptors(self) -> list[int]:
        return [self._socket.fileno()]

    @property
    def machines(self) -> list[str]:
        """The names of the machines, by their number from 1 on."""
        return [node.machine for node in self._nodes]

    def write(self, parts: Sequence[bytes], check: Callable[[], None]) -> None:
        for node in self._nodes:
            self._send(node, MESSAGE, *parts)
        if time.monotonic() > self._read + _READ_S:
            self.receive()

    def receive(self) -> None:
        for _ in range(_MAX_MESSAGES):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            node = next((node for node in self._nodes if node.identity == identity), None)
            if node is None:
                self._answer(identity, self._admit(identity, frames))
            else:
                self._note(node, frames)
        self._read = time.monotonic()
        self._check_hosts(self._read)

    def close(self, at_once: bool = False) -> None:
        """Close the connections, at which rank hosts kill their ranks; idempotent."""
        if self._socket.closed:
            return
        self._socket.close(linger=0)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()

    def _listen(self, host: str, port: int) -> None:
        address = f"tcp://{ip_address(host)}:{port}"
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise ValueError(
                f"cannot listen on {address}, where rank hosts connect: {error.strerror}; give an address of this "
                "machine as master_addr, and a free port as master_port"
            ) from error

    def _admit(self, identity: bytes, frames: Sequence[bytes]) -> Answer:
        """Return the answer to the first message of a rank host, which is admitted unless it is refused."""
        try:
            hello = _decode(frames)
        except DECODE_ERRORS as error:
            return Refused(reason=f"this is not what a rank host says first: {error}")
        if not isinstance(hello, Hello):
            return Refused(reason=f"a rank host says Hello first, not {type(hello).__name__}; start it again")
        if (hello.protocol, hello.package) != (PROTOCOL, __version__):
            return Refused(
                reason=f"it has protocol {hello.protocol} and version {hello.package}, and the core has {PROTOCOL} and "
                f"{__version__}; install one version of vllm-mp"
            )
        node = next((node for node in self._nodes if node.number == hello.node), None)
        if node is None:
            numbers = f"1 to {len(self._nodes)}"
            return Refused(reason=f"node_rank={hello.node}: the other machines have the numbers {numbers}")
        if node.identity is not None:
            self._send(node, PROBE)  # raises if the connection is lost, and this is the same rank host again
            return Refused(reason=f"node_rank={hello.node} is taken by the machine {node.machine}; give another number")
        if differing := differences(hello.options, self._options):
            return Refused(reason=f"it has other options than the core: {differing}; give all machines the same")
        node.admit(identity, hello.machine)
        logger.info("%s runs the ranks %s", node.name, ", ".join(str(state.rank) for state in node.ranks))
        return Welcome(meeting_place=self._meeting_place)

    def _answer(self, identity: bytes, answer: Answer) -> None:
        if isinstance(answer, Refused) and self._num_refusals < _MAX_REFUSALS_LOGGED:
            self._num_refusals += 1
            logger.warning("a rank host is refused: %s", answer.reason)
        with contextlib.suppress(zmq.ZMQError):  # it has gone
            self._socket.send_multipart([identity, ANSWER, msgspec.msgpack.encode(answer)], zmq.NOBLOCK)

    def _note(self, node: _Node, frames: Sequence[bytes]) -> None:
        """Process a message of an admitted rank host."""
        node.heard = time.monotonic()
        try:
            said = _decode(frames)
        except DECODE_ERRORS as error:
            raise WorkerFailedError(f"{node.name} says what no rank host says: {error}") from error
        match said:
            case RanksFailed(error=reason, is_mistake=True):
                raise ValueError(f"{node.name}: {reason}")
            case RanksFailed(error=reason, outside_signal=number):
                raise WorkerFailedError(f"{node.name}: {reason}", number)
            case Said(rank=rank) if rank in (by_rank := {state.rank: state for state in node.ranks}):
                by_rank[rank].note(said.said)
            case Started(pids=pids) if len(pids) == len(node.ranks):
                for state, pid in zip(node.ranks, pids, strict=True):
                    state.pid = pid
            case Beats(num_beats=counts) if len(counts) == len(node.ranks):
                for state, count in zip(node.ranks, counts, strict=True):
                    state.num_beats = count
            case _:
                raise WorkerFailedError(f"{node.name} says what no rank host says: {reprlib.repr(said)}")

    def _check_hosts(self, now: float) -> None:
        """Raise if a rank host is missing for too long, or has gone."""
        probes = now > self._probed + _PROBE_S
        if probes:
            self._probed = now
        for node in self._nodes:
            if node.identity is None:
                if now > self._deadline:
                    raise ValueError(missing_node(self._config, node.number, self._wait_s))
            elif now > node.heard + self._silence_s:
                raise WorkerFailedError(f"the rank host of {node.name} has said nothing for {self._silence_s:g} s")
            elif probes:
                self._send(node, PROBE)

    def _send(self, node: _Node, *frames: bytes) -> None:
        assert node.identity is not None
        try:
            self._socket.send_multipart([node.identity, *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise WorkerFailedError(f"the rank host of {node.name} has gone: {error.strerror}") from error


def _decode(frames: Sequence[bytes]) -> FromHost:
    """Return the message that a rank host has sent; raise one of `DECODE_ERRORS` for anything else."""
    if len(frames) != 1:
        raise msgspec.DecodeError(f"{len(frames)} frames instead of one")
    said: FromHost = msgspec.msgpack.decode(frames[0], type=FromHost)
    return said
