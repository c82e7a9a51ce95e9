"""The program of a machine that has ranks but no core: it runs them for the cores of node 0, one after another.

It starts its ranks as a core does, passes on to them what the core says, and tells the core what they say, that they
make progress, and how they end. When the core is gone it ends them, and connects to the next core at the same address.
"""

import logging
import os
import signal
import socket
import sys
import threading
import time
from typing import Final, NoReturn

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from vllm_mp.config import VllmConfig
from vllm_mp.config.nodes import ip_address
from vllm_mp.core.parallel.messages import PROTOCOL, shared_options
from vllm_mp.core.parallel.node_messages import (
    ANSWER,
    BEAT_S,
    MESSAGE,
    Answer,
    Beats,
    FromHost,
    Hello,
    RanksFailed,
    Refused,
    Said,
    Started,
)
from vllm_mp.core.parallel.rank_state import WorkerFailedError
from vllm_mp.core.parallel.worker_processes import WorkerProcesses
from vllm_mp.core.parent_watch import wait_for_end_of_parent
from vllm_mp.keys.curve_keys import ClientKey, read_client_key
from vllm_mp.keys.curve_server import probe_peers
from vllm_mp.machine.log_setup import set_up_core_log
from vllm_mp.version import __version__
from vllm_mp.wire import DECODE_ERRORS

logger = logging.getLogger(__name__)

_RECONNECT_MS: Final = 200
_LONGEST_RECONNECT_MS: Final = 2000
_LINGER_MS: Final = 200
_STOP_GRACE_S: Final = 5.0
"""Time that the ranks have to end after the parent's death, before the process is ended."""


class CoreLostError(Exception):
    """Raised when the connection to the core has ended."""


class RefusedError(Exception):
    """Raised when the core does not take this machine, with the reason."""


def main() -> int:
    """Run the ranks of the machine whose configuration is on standard input, until a signal.

    With `--follow-parent` also until its parent has ended, or closes standard input. Return the exit code: 0 after a
    signal, 1 if the core refuses this machine, or if no core comes.
    """
    parent_pid = os.getppid()
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=VllmConfig)
    set_up_core_log(f"rank host {config.parallel_config.node_rank}")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
        if "--follow-parent" in sys.argv[1:]:
            threading.Thread(target=_follow_parent, args=(parent_pid,), name="parent-watch", daemon=True).start()
        host = RankHost(config)
        while True:
            host.serve_next_core()
    except _Stopped:
        return 0
    except (RefusedError, ValueError) as error:
        logger.error("%s", error)
        return 1


class _Stopped(BaseException):
    """A signal has told this process to stop."""


def _stop(number: int, frame: object) -> NoReturn:
    raise _Stopped


def _follow_parent(pid: int) -> None:
    """End this process once the parent `pid` has ended or closes standard input."""
    wait_for_end_of_parent(pid)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_STOP_GRACE_S)
    os._exit(1)


class RankHost:
    """The ranks of this machine, for one core after another."""

    def __init__(self, config: VllmConfig) -> None:
        """Raises ValueError, with the remedy, if the key file cannot be read or the address of node 0 is unknown."""
        parallel = config.parallel_config
        self._config = config
        self._address = f"tcp://{ip_address(parallel.master_addr)}:{parallel.master_port}"
        self._key = read_client_key(parallel.node_key_file)

    def serve_next_core(self) -> None:
        """Wait for a core, and run ranks for it until it is gone.

        Raises RefusedError if it does not take this machine, or if there is none for `start_timeout_s`.
        """
        link = CoreLink(self._address, self._key)
        try:
            meeting_place = self._join(link)
            self._run_ranks(link, meeting_place)
        except CoreLostError:
            logger.warning("the core at %s has gone; waiting for the next", self._address)
        finally:
            link.close()

    def _join(self, link: "CoreLink") -> str:
        """Wait until a core takes this machine; return where its ranks meet."""
        timeout_s = self._config.liveness_config.start_timeout_s
        deadline = time.monotonic() + timeout_s
        parallel = self._config.parallel_config
        hello = Hello(
            node=parallel.node_rank,
            protocol=PROTOCOL,
            package=__version__,
            machine=socket.gethostname(),
            options=shared_options(self._config),
        )
        while True:
            if time.monotonic() > deadline:
                trouble = f" ({link.trouble})" if link.trouble else ""
                raise RefusedError(
                    f"no core at {self._address} has taken this machine for start_timeout_s={timeout_s:g} s{trouble}; "
                    "start the engine on node 0, or check --master-addr, --master-port and the key file"
                )
            link.wait([], BEAT_S)
            link.follow_connection(hello)
            for kind, *parts in link.messages():
                if kind == ANSWER:
                    try:
                        answer: Answer = msgspec.msgpack.decode(b"".join(parts), type=Answer)
                    except DECODE_ERRORS as error:
                        raise RefusedError(
                            f"the core at {self._address} answers what no core answers: {error}; install one version "
                            "of vllm-mp"
                        ) from error
                    if isinstance(answer, Refused):
                        raise RefusedError(f"the core at {self._address} refuses this machine: {answer.reason}")
                    return answer.meeting_place

    def _run_ranks(self, link: "CoreLink", meeting_place: str) -> None:
        """Run the ranks until the core has gone, then raise CoreLostError."""
        parallel = self._config.parallel_config
        ranks = None
        try:
            ranks = WorkerProcesses(self._config, parallel.ranks_of(parallel.node_rank), meeting_place)
            link.say(Started(pids=[state.pid for state in ranks.ranks]))
            messenger = _Messenger(link, ranks)
            while True:
                link.wait(ranks.descriptors, BEAT_S)
                messenger.tell()
                for kind, *parts in link.messages():
                    if kind == MESSAGE:
                        ranks.write(parts, messenger.tell)
        except (WorkerFailedError, ValueError, OSError) as error:
            logger.error("%s", error)
            number = error.outside_signal if isinstance(error, WorkerFailedError) else 0
            link.say(RanksFailed(error=str(error), is_mistake=isinstance(error, ValueError), outside_signal=number))
        finally:
            if ranks is not None:
                ranks.close(at_once=True)
        while True:  # the core ends because of this, and must not meet this machine again before
            link.wait([], BEAT_S)
            link.messages()
            link.follow_connection()


class _Messenger:
    """Sends the core the messages and the progress of the ranks."""

    def __init__(self, link: "CoreLink", ranks: WorkerProcesses) -> None:
        self._link = link
        self._ranks = ranks
        self._next_beat = 0.0

    def tell(self) -> None:
        """Send what is new; raises CoreLostError, and what `WorkerProcesses.receive` raises."""
        self._link.follow_connection()
        self._ranks.receive()
        for state in self._ranks.ranks:
            for said in state.unread:
                self._link.say(Said(rank=state.rank, said=said))
            state.unread.clear()
        if time.monotonic() > self._next_beat:
            self._next_beat = time.monotonic() + BEAT_S
            self._link.say(Beats(num_beats=[state.num_beats for state in self._ranks.ranks]))


class CoreLink:
    """The connection of a rank host to a core; it never connects twice, so that no message is lost silently."""

    def __init__(self, address: str, key: ClientKey) -> None:
        """Begin to connect, which is tried again until a core accepts the connection."""
        self._address = address
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _LONGEST_RECONNECT_MS)
        probe_peers(self._socket)
        self._socket.curve_publickey, self._socket.curve_secretkey, self._socket.curve_serverkey = key
        self._monitor = self._socket.get_monitor_socket()
        self._is_open = False
        self.trouble = ""
        """Why there is no connection, as far as known."""
        self._socket.connect(address)

    def wait(self, descriptors: list[int], seconds: float) -> None:
        """Return when the core or one of `descriptors` has news, or after `seconds`."""
        poller = zmq.Poller()
        for source in (self._socket, self._monitor, *descriptors):
            poller.register(source, zmq.POLLIN)
        poller.poll(int(1000 * seconds))

    def follow_connection(self, hello: Hello | None = None) -> None:
        """Say `hello` once the connection is made; connect again if another program has answered at the address.

        Raises CoreLostError when it has ended, and RefusedError if the core does not know the key of this machine.
        """
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
                raise RefusedError(
                    f"the core at {self._address} does not know the key of this machine; copy the key file that it "
                    "names from node 0, or add this key there with `vllm-mp keys allow`"
                )
            if event == zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
                self._note_trouble("it ends the connection at once: was the key file made with that core's public key?")
            if event == zmq.Event.HANDSHAKE_SUCCEEDED and hello is not None:
                self._is_open = True
                self.say(hello)
            if event == zmq.Event.DISCONNECTED and self._is_open:
                raise CoreLostError
        if not (self._is_open or self._socket.poll(0, zmq.POLLOUT)):
            # ZeroMQ gives up an address whose peer speaks another protocol.
            self._note_trouble("another program answers there")
            time.sleep(_RECONNECT_MS / 1000)
            self._socket.disconnect(self._address)
            self._socket.connect(self._address)

    def _note_trouble(self, trouble: str) -> None:
        if trouble != self.trouble:
            logger.warning("no core at %s takes this machine yet: %s", self._address, trouble)
        self.trouble = trouble

    def messages(self) -> list[list[bytes]]:
        """Return the messages of the core that have arrived."""
        messages = []
        while True:
            try:
                messages.append(self._socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return messages

    def say(self, message: FromHost) -> None:
        """Send a message; raises CoreLostError if the core has left too many unread."""
        try:
            self._socket.send(msgspec.msgpack.encode(message), zmq.NOBLOCK)
        except zmq.Again as error:
            raise CoreLostError from error

    def close(self) -> None:
        """Close the connection, after unsent messages had a moment to leave."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=_LINGER_MS)
        self._context.term()
