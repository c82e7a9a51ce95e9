"""The processes of ranks on this machine: their start, their messages, and their end."""

import contextlib
import fcntl
import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from vllm_mp.config import VllmConfig
from vllm_mp.core.collectives import shared_group
from vllm_mp.core.collectives.tensor_queue import TensorQueue
from vllm_mp.core.parallel.messages import MAX_REPLY_BYTES, Failed, FromRank, WorkerLaunch
from vllm_mp.core.parallel.rank_fork import fork_rank
from vllm_mp.core.parallel.rank_state import RankState, WorkerFailedError
from vllm_mp.core.parallel.ring import MessageRing
from vllm_mp.core.parallel.shared_memory import MemoryLayout
from vllm_mp.core_link.core_environment import core_environment, package_path
from vllm_mp.core_link.core_launch import KeptCache
from vllm_mp.machine.exit_status import describe_exit
from vllm_mp.machine.forked_process import ForkedProcess
from vllm_mp.machine.host_cpus import named_cpus
from vllm_mp.wire import DECODE_ERRORS

logger = logging.getLogger(__name__)

_STOP_S: Final = 2.0
"""Time that a rank has to end by itself."""
_OUTSIDE_SIGNALS: Final = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)
"""Signals that only another process or the kernel sends, and that end a rank."""


class _Worker(RankState):
    """The process of a rank, and its state."""

    def __init__(
        self,
        rank: int,
        stage: int | None,
        process: "subprocess.Popen[bytes] | ForkedProcess",
        said: socket.socket,
        event: int,
    ) -> None:
        """`stage` is None if there is only one."""
        super().__init__(rank, stage)
        self.pid = process.pid
        self.process = process
        self.said = said
        self.event = event

    def is_stopped(self) -> bool:
        try:
            return os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # it has ended
            return False


class WorkerProcesses:
    """The processes of ranks on this machine; it is a `vllm_mp.core.parallel.rank_state.RankSource`.

    The kernel kills them if this process ends in any way, so none is left behind.
    """

    def __init__(
        self, config: VllmConfig, ranks: Sequence[int], meeting_place: str, kept_cache: KeptCache | None = None
    ) -> None:
        """Start the processes of `ranks`, which meet the ranks of other machines at `meeting_place`.

        They have their caches in `kept_cache`; None: these end with them.
        Call this in the main thread: the ranks end when the thread that has started them ends.
        """
        parallel = config.parallel_config
        self._sums_are_here = parallel.nnodes == 1
        self.has_own_cpus = parallel.ranks_per_node <= len(named_cpus(config.device_config.cpus))
        """No two ranks have the same CPUs, so that they may spin for a moment when they wait."""
        # It has space for the ranks of all machines; those that are not used take no memory.
        self.layout = layout = MemoryLayout.of(config)
        descriptor = os.memfd_create("vllm_mp-ranks")
        os.ftruncate(descriptor, layout.total_bytes)
        fcntl.fcntl(descriptor, fcntl.F_SETFD, 0)
        self.memory = mmap.mmap(descriptor, 0)
        self._ring = MessageRing(self.memory, 0, layout.num_ranks - 1, layout.message_slot, layout.num_messages)
        self._meeting_place = meeting_place
        self._kept_cache = kept_cache
        self.ranks: list[_Worker] = []
        try:
            for rank in ranks:
                self.ranks.append(self._start(config, rank, descriptor))
        except BaseException:
            self.close(at_once=True)
            raise
        finally:
            os.close(descriptor)

    @property
    def descriptors(self) -> list[int]:
        return [worker.said.fileno() for worker in self.ranks]

    def write(self, parts: Sequence[bytes], check: Callable[[], None]) -> None:
        events = [worker.event for worker in self.ranks]
        self._ring.write(parts, events, check, [worker.rank - 1 for worker in self.ranks])

    def receive(self) -> None:
        for worker in self.ranks:
            worker.num_beats = self._ring.progress[worker.rank - 1].num_beats
            self._receive(worker)

    def advance(self, rank: int) -> tuple[int, ...]:
        """Return how far `rank` has got: steps sent to the next stage, its stage, sums in its stage.

        Return nothing if the ranks are on several machines, where they do not tell this.
        """
        if not self._sums_are_here:
            return ()
        layout = self.layout
        stage, rank_in_stage = divmod(rank, layout.tensor_size)
        num_sums = shared_group.rounds(self.memory, layout.group_at(stage), layout.tensor_size)[rank_in_stage]
        num_sent = 0
        if layout.num_stages > 1:
            reader = (rank + layout.tensor_size) % layout.num_ranks
            num_sent = TensorQueue.written(self.memory, layout.queue_at(reader))
        return num_sent, stage, num_sums

    def close(self, at_once: bool = False) -> None:
        for worker in self.ranks:
            worker.said.close()
            if at_once:
                worker.process.kill()
        deadline = time.monotonic() + _STOP_S
        for worker in self.ranks:
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            os.close(worker.event)
        self.ranks = []

    def _start(self, config: VllmConfig, rank: int, memory: int) -> _Worker:
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        event = os.eventfd(0, os.EFD_CLOEXEC)
        kept = self._kept_cache
        with theirs:
            inherited = [memory, event, theirs.fileno()]
            if kept is not None:
                inherited += [kept.descriptors[rank], *(kept.mailboxes[rank] if kept.mailboxes else ())]
            process: subprocess.Popen[bytes] | ForkedProcess | None = fork_rank(inherited)
            if process is None:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "vllm_mp.core", "--worker"],
                    stdin=subprocess.PIPE,
                    env=core_environment() | package_path(),
                    pass_fds=inherited,
                )
            launch = WorkerLaunch(
                config=config,
                rank=rank,
                parent_pid=os.getpid(),
                memory=memory,
                layout=self.layout,
                event=event,
                socket=theirs.fileno(),
                has_own_cpus=self.has_own_cpus,
                meeting_place=self._meeting_place,
                kept_cache=kept,
            )
        worker = _Worker(rank, self.layout.stage_of(rank), process, own, event)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as line:
            line.write(msgspec.json.encode(launch) + b"\n")
        own.setblocking(False)
        return worker

    def _receive(self, worker: _Worker) -> None:
        """Read the messages of `worker`; raise if it has failed or ended."""
        while True:
            try:
                data = worker.said.recv(MAX_REPLY_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                raise self._end_of(worker)
            try:
                said = msgspec.msgpack.decode(data, type=FromRank)
            except DECODE_ERRORS as error:
                raise WorkerFailedError(f"{worker.name} says what no rank says: {error}") from error
            if isinstance(said, Failed):
                if said.is_mistake:
                    raise ValueError(f"{worker.name}: {said.error}")
                raise WorkerFailedError(f"{worker.name} failed: {said.error}")
            worker.note(said)

    def _end_of(self, worker: _Worker) -> WorkerFailedError:
        try:
            code = worker.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            return WorkerFailedError(f"{worker.name} ended with a closed connection")
        outside_signal = -code if -code in _OUTSIDE_SIGNALS else 0
        return WorkerFailedError(f"{worker.name} ended with {describe_exit(code)}", outside_signal)
