"""The ranks 1 and up, as their core waits for them and watches them, on whatever machine they run."""

import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from vllm_mp.config import ModelConfig, VllmConfig
from vllm_mp.core.collectives.meeting_place import MeetingPlace
from vllm_mp.core.parallel.messages import PROTOCOL, Joined, Ready, Reply, chosen_options, differences, digest_of
from vllm_mp.core.parallel.node_ranks import NodeRanks
from vllm_mp.core.parallel.rank_state import PATIENCE, RankSource, RankState, WorkerFailedError
from vllm_mp.core.parallel.worker_processes import WorkerProcesses
from vllm_mp.core.weights.digest import weights_digest
from vllm_mp.core_link.core_launch import KeptCache
from vllm_mp.version import __version__

_LOOK_S: Final = 0.1

Said = TypeVar("Said", Joined, Ready, Reply)


class Ranks:
    """All ranks of a core but its own.

    A rank that ends, hangs or says what no rank says is the end of the core: `check` then raises WorkerFailedError.
    """

    def __init__(
        self,
        config: VllmConfig,
        folder: Path,
        beat: Callable[[], None] = lambda: None,
        kept_cache: KeptCache | None = None,
        note_outside_signal: Callable[[int], None] = lambda number: None,
    ) -> None:
        """Start the ranks of this machine, which import and load while the core does, and let rank hosts connect.

        `folder` is private to the core. `beat` is called when a rank makes progress while the core waits. The ranks of
        this machine have their caches in `kept_cache`. `note_outside_signal` is called with the number of a signal by
        which another process has ended or stopped one of them. Call this in the main thread: the ranks end when the
        thread that has started them ends. Raises ValueError if rank hosts cannot connect to this machine as the
        configuration says.
        """
        limits, parallel = config.liveness_config, config.parallel_config
        self._beat = beat
        self._note_outside_signal = note_outside_signal
        self._limit_s = PATIENCE * limits.engine_iteration_timeout_s
        self._start_limit_s = PATIENCE * limits.start_timeout_s
        self.closing = threading.Event()
        """Set before the ranks are told to end."""
        self._lock = threading.RLock()
        """Held while a thread uses the sources."""
        self._failure: WorkerFailedError | ValueError | None = None
        """What the first `look` that failed has raised; each further one raises it again."""
        self._last_look = time.monotonic()
        self._is_serving = False
        self.meeting_place = MeetingPlace(config, folder)
        self.remote = NodeRanks(config, self.meeting_place.address) if parallel.nnodes > 1 else None
        try:
            self.local = WorkerProcesses(config, parallel.ranks_of(0)[1:], self.meeting_place.address, kept_cache)
        except BaseException:
            if self.remote is not None:
                self.remote.close()
            raise
        self._sources: list[RankSource] = [self.local] if self.remote is None else [self.local, self.remote]
        self._ranks: list[RankState] = [state for source in self._sources for state in source.ranks]
        """In the order of ranks."""

    @property
    def descriptors(self) -> list[int]:
        """Descriptors that become readable when a rank says something or ends."""
        return [descriptor for source in self._sources for descriptor in source.descriptors]

    @property
    def pids(self) -> list[int]:
        """The processes of the ranks 1 and up, each on its machine."""
        return [state.pid for state in self._ranks]

    @property
    def machines(self) -> list[str]:
        """The names of the other machines, by their number from 1 on."""
        return [] if self.remote is None else self.remote.machines

    def join(self, config: VllmConfig, keep_going: Callable[[], None]) -> None:
        """Wait until all ranks have joined with the completed `config` of the core.

        `keep_going` is called while this waits, and may raise. Raises ValueError, naming the rank, if a rank has
        another version or other options.
        """
        expected = (PROTOCOL, __version__, digest_of(config))
        for state in self._ranks:
            joined = self._next(state, Joined, keep_going)
            if (joined.protocol, joined.package, joined.digest) != expected or joined.rank != state.rank:
                if joined.package == __version__ and (differing := differences(joined.chosen, chosen_options(config))):
                    raise ValueError(
                        f"{state.name} cannot join: its machine has chosen {differing}; give all machines these options"
                    )
                raise ValueError(
                    f"{state.name} cannot join: it has protocol {joined.protocol}, version {joined.package} and "
                    f"options with the digest {joined.digest}, and the core has {expected[0]}, {expected[1]} and "
                    f"{expected[2]}; install one version of vllm-mp, and start the engine again"
                )

    def wait_until_ready(self, model: ModelConfig, keep_going: Callable[[], None]) -> None:
        """Wait until all ranks can compute steps; `keep_going` as for `join`.

        Raises ValueError, naming the rank, if the weights that a rank has read are not `model`'s.
        """
        own = ""
        for state in self._ranks:
            ready = self._next(state, Ready, keep_going)
            own = own or (weights_digest(model) if ready.weights else "")
            if ready.weights and ready.weights != own:
                raise ValueError(
                    f"{state.name} has read other weights than the core; give all machines the same files of the model"
                )
        self._is_serving = True

    def replies(self, number: int) -> list[Reply]:
        """Wait for the replies of all ranks to the call with this number; return them by rank."""
        replies = []
        for state in self._ranks:
            reply = self._next(state, Reply, lambda: None)
            if reply.number != number:
                raise WorkerFailedError(f"{state.name} answers call {reply.number} instead of {number}")
            replies.append(reply)
        return replies

    def write(self, parts: Sequence[bytes]) -> None:
        """Send all ranks a message; raises as `check` does, and ValueError for a message that is too long."""
        self.expect_progress()
        with self._lock:
            for source in self._sources:
                source.write(parts, self.check)

    def look(self) -> None:
        """Raise WorkerFailedError if a rank has ended or failed, and ValueError for a mistake in the configuration.

        Once all ranks are ready there are no mistakes. Any thread may call this; no-op once `close` was called.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self.closing.is_set():
                return
            try:
                for source in self._sources:
                    source.receive()
            except WorkerFailedError as error:
                self._failure = error
                if error.outside_signal:
                    self._note_outside_signal(error.outside_signal)
                raise
            except ValueError as error:
                self._failure = WorkerFailedError(str(error)) if self._is_serving else error
                raise self._failure from error

    def check(self) -> None:
        """Do what `look` does, and raise WorkerFailedError if a rank makes no progress for too long.

        Call this in short intervals while the core waits for the ranks: only time between two calls counts.
        """
        self.look()
        self._check_progress(self._ranks)

    def expect_progress(self) -> None:
        """Begin again to count the time without progress: the ranks get something to do."""
        self._last_look = time.monotonic()
        for state in self._ranks:
            state.still_s = state.stopped_s = 0.0

    def close(self, at_once: bool = False) -> None:
        """End all ranks, by force `at_once` or if they have not ended after 2 seconds; idempotent."""
        self.closing.set()
        with self._lock:
            for source in reversed(self._sources):
                source.close(at_once)

    def _check_progress(self, ranks: Sequence[RankState]) -> None:
        now = time.monotonic()
        elapsed, self._last_look = min(now - self._last_look, 2 * _LOOK_S), now
        has_progress = False
        for state in ranks:
            has_progress |= state.num_beats != state.num_seen
            state.num_seen = state.num_beats
            state.still_s += elapsed
            state.stopped_s = state.stopped_s + elapsed if state.is_stopped() else 0.0
        if has_progress:  # a stage waits for another that computes, so the progress of one is the progress of all
            self._beat()
            for state in ranks:
                state.still_s = state.stopped_s = 0.0
        limit_s = self._limit_s if self._is_serving else self._start_limit_s  # parts of loading do not beat
        still = [state for state in ranks if state.still_s > limit_s or state.stopped_s > self._limit_s]
        if still:
            # The others wait for the rank that is behind.
            last = min(still, key=lambda state: (*self.local.advance(state.rank), state.num_beats))
            if last.stopped_s:
                self._note_outside_signal(signal.SIGSTOP)
            raise WorkerFailedError(self._describe_hang(last))

    def _describe_hang(self, state: RankState) -> str:
        if state.stopped_s:
            return (
                f"{state.name} has made no progress for {state.still_s:.1f} s, stopped by a signal; find out what "
                "sends its process SIGSTOP"
            )
        if self._is_serving:
            return (
                f"{state.name} has made no progress for {state.still_s:.1f} s; if its steps take that long, raise "
                "engine_iteration_timeout_s"
            )
        return (
            f"{state.name} has not got on with its start for {state.still_s:.1f} s; look for the cause on its machine, "
            "or if it takes that long, raise start_timeout_s"
        )

    def _next(self, state: RankState, kind: type[Said], keep_going: Callable[[], None]) -> Said:
        """Wait for the next message of a rank, which must be of this kind."""
        self.expect_progress()
        poll = select.poll()
        for descriptor in self.descriptors:
            poll.register(descriptor, select.POLLIN)
        self.look()
        while not state.unread:
            poll.poll(1000 * _LOOK_S)
            self.look()
            self._check_progress([state])
            keep_going()
        self._beat()
        said = state.unread.pop(0)
        if not isinstance(said, kind):
            raise WorkerFailedError(f"{state.name} says {type(said).__name__} where {kind.__name__} is due")
        return said
