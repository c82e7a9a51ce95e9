"""The processes of the ranks 1 and up, as their core sees them: their start, what they say, and their end."""

import contextlib
import fcntl
import logging
import mmap
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from vllm_mp import __version__
from vllm_mp.config import VllmConfig
from vllm_mp.core.parallel import shared_group, shared_memory
from vllm_mp.core.parallel.messages import (
    MAX_REPLY_BYTES,
    PROTOCOL,
    Failed,
    FromRank,
    Joined,
    Ready,
    Reply,
    WorkerLaunch,
    digest_of,
)
from vllm_mp.core.parallel.ring import MessageRing
from vllm_mp.core_launch import core_environment, package_path
from vllm_mp.exit_status import describe_exit
from vllm_mp.host_cpus import named_cpus

logger = logging.getLogger(__name__)

_STOP_S: Final = 2.0
"""Time that a rank has to end by itself."""
_LOOK_S: Final = 0.1
_PATIENCE: Final = 0.8
"""Share of the time without progress, after which the supervisor kills the core, that a rank gets. So the core itself
can say which rank hangs."""

Said = TypeVar("Said", Joined, Ready, Reply)


class WorkerFailedError(RuntimeError):
    """Raised when a rank has ended, hangs or says what no rank says; the core cannot continue."""


class _Worker:
    """One process, and what is known of it."""

    def __init__(self, rank: int, process: "subprocess.Popen[bytes]", said: socket.socket, event: int) -> None:
        self.rank = rank
        self.process = process
        self.said = said
        self.event = event
        self.unread: list[FromRank] = []
        self.num_beats = 0
        self.still_s = 0.0
        """Seconds without progress, as far as the core has looked."""

    @property
    def name(self) -> str:
        return f"rank {self.rank} (process {self.process.pid})"


class WorkerProcesses:
    """Starts the ranks 1 to `tensor_parallel_size` - 1 and watches them.

    A rank that ends, hangs or says what no rank says is the end of the core: `check` then raises WorkerFailedError. The
    kernel kills the ranks if the core ends in any way, so none is left behind.
    """

    def __init__(self, config: VllmConfig, folder: Path, beat: Callable[[], None] = lambda: None) -> None:
        """Start the processes, which import and load beside the core.

        `folder` is private to the core. `beat` is called when a rank makes progress while the core waits. Call this in
        the main thread: the ranks end when the thread that has started them ends.
        """
        self.size = config.parallel_config.tensor_parallel_size
        self._beat = beat
        self._limit_s = _PATIENCE * config.liveness_config.engine_iteration_timeout_s
        self._start_limit_s = config.liveness_config.start_timeout_s
        self.has_own_cpus = self.size <= len(named_cpus(config.device_config.cpus))
        """No two ranks have the same CPUs, so that they may spin for a moment when they wait."""
        self.slot_bytes = shared_memory.slot_bytes(config)
        descriptor = os.memfd_create("vllm_mp-ranks")
        os.ftruncate(descriptor, shared_memory.total_bytes(self.size, self.slot_bytes))
        fcntl.fcntl(descriptor, fcntl.F_SETFD, 0)
        self.memory = mmap.mmap(descriptor, 0)
        self.ring = MessageRing(self.memory, 0, self.size - 1, self.slot_bytes)
        self.meeting_place = str(folder / f"ranks-of-{os.getpid()}")
        self.closing = threading.Event()
        """Set before the ranks are told to end."""
        self._workers: list[_Worker] = []
        self._last_look = time.monotonic()
        self._is_serving = False
        try:
            for rank in range(1, self.size):
                self._workers.append(self._start(config, rank, descriptor))
        except BaseException:
            self.close(at_once=True)
            raise
        finally:
            os.close(descriptor)

    @property
    def events(self) -> list[int]:
        """The event descriptors of the ranks."""
        return [worker.event for worker in self._workers]

    @property
    def descriptors(self) -> list[int]:
        """Descriptors that become readable when a rank says something or ends."""
        return [worker.said.fileno() for worker in self._workers]

    @property
    def pids(self) -> list[int]:
        """The processes of the ranks 1 and up."""
        return [worker.process.pid for worker in self._workers]

    def join(self, config: VllmConfig, keep_going: Callable[[], None]) -> None:
        """Wait until all ranks have joined with the completed `config` of the core.

        `keep_going` is called while this waits, and may raise. Raises ValueError, naming the rank, if a rank has
        another version or other options.
        """
        expected = (PROTOCOL, __version__, digest_of(config))
        for worker in self._workers:
            joined = self._next(worker, Joined, keep_going)
            if (joined.protocol, joined.package, joined.digest) != expected or joined.rank != worker.rank:
                raise ValueError(
                    f"{worker.name} cannot join: it has protocol {joined.protocol}, version {joined.package} and "
                    f"options with the digest {joined.digest}, and the core has {expected[0]}, {expected[1]} and "
                    f"{expected[2]}; install one version of vllm-mp, and start the engine again"
                )

    def wait_until_ready(self, keep_going: Callable[[], None]) -> None:
        """Wait until all ranks can compute steps; `keep_going` as for `join`."""
        for worker in self._workers:
            self._next(worker, Ready, keep_going)
        self._is_serving = True

    def replies(self, number: int) -> list[Reply]:
        """Wait for the replies of all ranks to the call with this number; return them by rank."""
        replies = []
        for worker in self._workers:
            reply = self._next(worker, Reply, lambda: None)
            if reply.number != number:
                raise WorkerFailedError(f"{worker.name} answers call {reply.number} instead of {number}")
            replies.append(reply)
        return replies

    def look(self) -> None:
        """Raise WorkerFailedError if a rank has ended or failed, and ValueError for a mistake in the configuration."""
        for worker in self._workers:
            self._receive(worker)

    def check(self) -> None:
        """Do what `look` does, and raise WorkerFailedError if a rank makes no progress for too long.

        Call this in short intervals while the core waits for the ranks: only time between two calls counts.
        """
        self.look()
        self._check_progress(self._workers)

    def _check_progress(self, workers: Sequence[_Worker]) -> None:
        now = time.monotonic()
        elapsed, self._last_look = min(now - self._last_look, 2 * _LOOK_S), now
        for worker in workers:
            num_beats = self.ring.progress[worker.rank - 1].num_beats
            if num_beats != worker.num_beats:
                worker.num_beats, worker.still_s = num_beats, 0.0
                self._beat()
            else:
                worker.still_s += elapsed
        limit_s = self._limit_s if self._is_serving else self._start_limit_s  # parts of loading do not beat
        still = [worker for worker in workers if worker.still_s > limit_s]
        if still:
            rounds = shared_group.rounds(self.memory, shared_memory.group_offset(self.size, self.slot_bytes), self.size)
            # The others wait for the rank that is behind.
            last = min(still, key=lambda worker: (rounds[worker.rank], worker.num_beats))
            raise WorkerFailedError(
                f"{last.name} has made no progress for {last.still_s:.1f} s; if its steps take that long, raise "
                "engine_iteration_timeout_s"
            )

    def expect_progress(self) -> None:
        """Begin again to count the time without progress: the ranks get something to do."""
        self._last_look = time.monotonic()
        for worker in self._workers:
            worker.still_s = 0.0

    def close(self, at_once: bool = False) -> None:
        """End all ranks, by force `at_once` or if they have not ended after 2 seconds; idempotent."""
        self.closing.set()
        for worker in self._workers:
            worker.said.close()
            if at_once:
                worker.process.kill()
        deadline = time.monotonic() + _STOP_S
        for worker in self._workers:
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            os.close(worker.event)
        self._workers = []

    def _start(self, config: VllmConfig, rank: int, memory: int) -> _Worker:
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        event = os.eventfd(0, os.EFD_CLOEXEC)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "vllm_mp.core", "--worker"],
                stdin=subprocess.PIPE,
                env=core_environment() | package_path(),
                pass_fds=(memory, event, theirs.fileno()),
            )
            launch = WorkerLaunch(
                config=config,
                rank=rank,
                parent_pid=os.getpid(),
                memory=memory,
                slot_bytes=self.slot_bytes,
                event=event,
                socket=theirs.fileno(),
                has_own_cpus=self.has_own_cpus,
                meeting_place=self.meeting_place,
            )
        worker = _Worker(rank, process, own, event)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as line:
            line.write(msgspec.json.encode(launch) + b"\n")
        own.setblocking(False)
        return worker

    def _next(self, worker: _Worker, kind: type[Said], keep_going: Callable[[], None]) -> Said:
        """Wait for the next thing that `worker` says, which must be of this kind."""
        self.expect_progress()
        poll = select.poll()
        poll.register(worker.said, select.POLLIN)
        while not worker.unread:
            poll.poll(1000 * _LOOK_S)
            self.look()
            self._check_progress([worker])
            keep_going()
        said = worker.unread.pop(0)
        if not isinstance(said, kind):
            raise WorkerFailedError(f"{worker.name} says {type(said).__name__} where {kind.__name__} is due")
        return said

    def _receive(self, worker: _Worker) -> None:
        """Read what `worker` has said; raise if it has failed or ended."""
        while True:
            try:
                data = worker.said.recv(MAX_REPLY_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                raise WorkerFailedError(f"{worker.name} ended with {self._end_of(worker)}")
            try:
                said = msgspec.msgpack.decode(data, type=FromRank)
            except msgspec.MsgspecError as error:
                raise WorkerFailedError(f"{worker.name} says what no rank says: {error}") from error
            if isinstance(said, Failed):
                if said.is_mistake:
                    raise ValueError(said.error)
                raise WorkerFailedError(f"{worker.name} failed: {said.error}")
            worker.unread.append(said)

    def _end_of(self, worker: _Worker) -> str:
        try:
            return describe_exit(worker.process.wait(_STOP_S))
        except subprocess.TimeoutExpired:
            return "a closed connection"
