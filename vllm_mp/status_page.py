"""A page of shared memory in which the core says what it is doing.

The core writes it before and after every step without a call to the system, and it outlives a kill: whoever
supervises the core reads from it whether the core makes progress and which requests were in the steps that were
executing. One writer, any number of readers; a sequence number that is odd during a write (a seqlock) keeps
readers from taking half an update.
"""

import contextlib
import enum
import mmap
import os
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_mp.wire import SLEEP_LEVELS, SLEEP_TAGS

_MAGIC = 0x564D_5053_0002
_HEADER_BYTES = 4096
MAX_STEP_REQUESTS = 65_536
"""Most requests of one step that the page can name."""
_WRITE_TIMEOUT_S = 0.1
"""A write takes microseconds, but its writer may lose the processor in the middle of it."""
_SIZE = _HEADER_BYTES + 12 * MAX_STEP_REQUESTS


class CoreState(enum.IntEnum):
    STARTING = 0
    LOADING = 1
    IDLE = 2
    STEPPING = 3
    STOPPED = 4


class _Field(enum.IntEnum):
    """Positions of the page's 64-bit header fields."""

    MAGIC = 0
    SEQUENCE = 1
    INCARNATION = 2
    PID = 3
    STATE = 4
    STEP = 5
    HEARTBEAT_NS = 6
    STATE_SINCE_NS = 7
    LOAD_PERMILLE = 8
    NUM_RUNNING = 9
    NUM_WAITING = 10
    FREE_BLOCKS = 11
    TOTAL_BLOCKS = 12
    NUM_STEP_REQUESTS = 13
    SLEEP_LEVEL = 14
    MISSING = 15
    """A bit for each of `SLEEP_TAGS`."""


class SleepState(NamedTuple):
    """What a core has given up for the time that it sleeps."""

    level: int
    """0 where it is awake."""
    missing: tuple[str, ...]
    """Those of `wire.SLEEP_TAGS` that have not come back; none exactly where it is awake."""


AWAKE = SleepState(0, ())


class StepRequests(NamedTuple):
    """The requests of a step, or of several, [n] each."""

    clients: npt.NDArray[np.uint32]
    slots: npt.NDArray[np.uint32]
    num_output_tokens: npt.NDArray[np.integer]
    """Tokens that their answers have."""


class CoreStatus(NamedTuple):
    """One consistent reading of the page. Times are in seconds."""

    incarnation: int
    pid: int
    state: CoreState
    step: int
    heartbeat_age: float
    """Since the core last wrote the page."""
    state_age: float
    """Since the state was entered; while STEPPING, since a step was last begun or ended."""
    load_progress: float
    """0 to 1."""
    num_running: int
    num_waiting: int
    free_blocks: int
    total_blocks: int
    step_requests: list[tuple[int, int, int]]
    """(client index, slot, tokens of the answer) of each request in the steps that are executing; empty between steps.
    """
    sleep: SleepState = AWAKE

    def __str__(self) -> str:
        return (
            f"{self.state.name} for {self.state_age:.1f} s, step {self.step} with {len(self.step_requests)} requests, "
            f"last beat {self.heartbeat_age:.1f} s ago, {self.num_running} running, {self.num_waiting} waiting, "
            f"{self.free_blocks} of {self.total_blocks} KV blocks free"
            f"{f', asleep at level {self.sleep.level}' if self.sleep.missing else ''}"
        )


class StatusPage:
    """The page in memory; made by `create` in the core, by `open` in whoever watches it."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._header: npt.NDArray[np.int64] = np.frombuffer(memory, np.int64, count=_HEADER_BYTES // 8)
        self._step_requests: npt.NDArray[np.uint32] = np.frombuffer(memory, np.uint32, offset=_HEADER_BYTES).reshape(
            -1, 3
        )

    @classmethod
    def create(cls, path: str | None, incarnation: int) -> "StatusPage":
        """Make a fresh page at `path`, readable by its owner alone; without a path, one that nobody else sees.

        Raises ValueError when there is no room or no right to make it.
        """
        if path is None:
            page = cls(mmap.mmap(-1, _SIZE))
        else:
            try:
                # A file of its own: cutting one short that others have mapped would end them.
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
                try:
                    # Space is taken now: a page of a full disk would end the process at the first write to it.
                    os.posix_fallocate(descriptor, 0, _SIZE)
                    page = cls(mmap.mmap(descriptor, _SIZE))
                finally:
                    os.close(descriptor)
            except OSError as error:
                raise ValueError(
                    f"cannot make the status page {path}: {error.strerror}; make room there, or set TMPDIR to a "
                    "folder that has some"
                ) from error
        page._header[_Field.INCARNATION] = incarnation
        page._header[_Field.PID] = os.getpid()
        page.enter(CoreState.STARTING)
        page._header[_Field.MAGIC] = _MAGIC
        return page

    @classmethod
    def open(cls, path: Path) -> "StatusPage | None":
        """Map the page at `path` for reading; None while there is no complete page there."""
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            if os.fstat(descriptor).st_size < _SIZE:
                return None
            page = cls(mmap.mmap(descriptor, _SIZE, prot=mmap.PROT_READ))
        finally:
            os.close(descriptor)
        return page if page._header[_Field.MAGIC] == _MAGIC else None

    def enter(self, state: CoreState, load_progress: float = 0.0) -> None:
        """Note that the core has entered `state`, and beat.

        The requests of a step that has not ended stay on the page: it may be what ends the core.
        """
        header = self._header
        header[_Field.SEQUENCE] += 1
        header[_Field.STATE] = state
        header[_Field.LOAD_PERMILLE] = int(load_progress * 1000)
        header[_Field.HEARTBEAT_NS] = header[_Field.STATE_SINCE_NS] = time.monotonic_ns()
        header[_Field.SEQUENCE] += 1

    def beat(self) -> None:
        """Note that the core is alive."""
        self._header[_Field.HEARTBEAT_NS] = time.monotonic_ns()

    def note_sleep(self, sleep: SleepState) -> None:
        """Note that the core sleeps, or does not any more."""
        header = self._header
        header[_Field.SEQUENCE] += 1
        header[_Field.SLEEP_LEVEL] = sleep.level
        header[_Field.MISSING] = sum(1 << SLEEP_TAGS.index(tag) for tag in sleep.missing)
        header[_Field.SEQUENCE] += 1

    def begin_step(
        self,
        step: int,
        clients: npt.NDArray[np.uint32],
        slots: npt.NDArray[np.uint32],
        num_output_tokens: npt.NDArray[np.integer],
    ) -> None:
        """Put the requests of the step about to execute, and of those that still do, on the page.

        `num_output_tokens` are the tokens that their answers have. No request may be there twice.
        """
        header = self._header
        header[_Field.SEQUENCE] += 1
        self._write_requests(clients, slots, num_output_tokens)
        header[_Field.STATE] = CoreState.STEPPING
        header[_Field.STEP] = step
        header[_Field.HEARTBEAT_NS] = header[_Field.STATE_SINCE_NS] = time.monotonic_ns()
        header[_Field.SEQUENCE] += 1

    def end_step(
        self, num_running: int, num_waiting: int, free_blocks: int, total_blocks: int, left: StepRequests | None = None
    ) -> None:
        """Note what the core holds and take the requests off the page but for those `left` in steps that execute."""
        header = self._header
        header[_Field.SEQUENCE] += 1
        if left is None:
            header[_Field.NUM_STEP_REQUESTS] = 0
            header[_Field.STATE] = CoreState.IDLE
        else:
            self._write_requests(*left)
        header[_Field.NUM_RUNNING] = num_running
        header[_Field.NUM_WAITING] = num_waiting
        header[_Field.FREE_BLOCKS] = free_blocks
        header[_Field.TOTAL_BLOCKS] = total_blocks
        header[_Field.HEARTBEAT_NS] = header[_Field.STATE_SINCE_NS] = time.monotonic_ns()
        header[_Field.SEQUENCE] += 1

    def _write_requests(
        self,
        clients: npt.NDArray[np.uint32],
        slots: npt.NDArray[np.uint32],
        num_output_tokens: npt.NDArray[np.integer],
    ) -> None:
        count = min(len(slots), MAX_STEP_REQUESTS)
        self._step_requests[:count, 0] = clients[:count]
        self._step_requests[:count, 1] = slots[:count]
        self._step_requests[:count, 2] = num_output_tokens[:count]
        self._header[_Field.NUM_STEP_REQUESTS] = count

    @property
    def state(self) -> CoreState:
        return _state(int(self._header[_Field.STATE]))

    def progress(self) -> tuple[int, int]:
        """What changes whenever the core gets on: its step and its last beat."""
        return int(self._header[_Field.STEP]), int(self._header[_Field.HEARTBEAT_NS])

    def read(self) -> CoreStatus:
        """A consistent reading; of a writer killed during a write, the torn page after `_WRITE_TIMEOUT_S`."""
        deadline = time.monotonic() + _WRITE_TIMEOUT_S
        while True:
            before = int(self._header[_Field.SEQUENCE])
            fields = self._header[: len(_Field)].tolist()
            requests = self._step_requests[: fields[_Field.NUM_STEP_REQUESTS]].tolist()
            if before % 2 == 0 and before == self._header[_Field.SEQUENCE]:
                break
            if time.monotonic() > deadline:
                break
            time.sleep(1e-5)  # the writer may be waiting for this processor
        now = time.monotonic_ns()
        return CoreStatus(
            incarnation=fields[_Field.INCARNATION],
            pid=fields[_Field.PID],
            state=_state(fields[_Field.STATE]),
            step=fields[_Field.STEP],
            heartbeat_age=max(0.0, (now - fields[_Field.HEARTBEAT_NS]) / 1e9),
            state_age=max(0.0, (now - fields[_Field.STATE_SINCE_NS]) / 1e9),
            load_progress=fields[_Field.LOAD_PERMILLE] / 1000,
            num_running=fields[_Field.NUM_RUNNING],
            num_waiting=fields[_Field.NUM_WAITING],
            free_blocks=fields[_Field.FREE_BLOCKS],
            total_blocks=fields[_Field.TOTAL_BLOCKS],
            step_requests=[(client, slot, num_output_tokens) for client, slot, num_output_tokens in requests],
            sleep=_sleep(fields[_Field.SLEEP_LEVEL], fields[_Field.MISSING]),
        )


def _sleep(level: int, bits: int) -> SleepState:
    """The state; `AWAKE` for what a core whose memory went wild may have left on the page."""
    missing = tuple(tag for i, tag in enumerate(SLEEP_TAGS) if bits >> i & 1)
    return SleepState(level, missing) if missing and level in SLEEP_LEVELS else AWAKE


def _state(value: int) -> CoreState:
    """The state; STOPPED for what a core whose memory went wild may have left on the page."""
    return CoreState(value) if value in set(CoreState) else CoreState.STOPPED
