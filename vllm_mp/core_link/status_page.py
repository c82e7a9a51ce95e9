"""A page of shared memory in which the core publishes its state.

The core writes the page before and after every step, without a system call. The page survives a kill of the core: the
supervisor reads from it whether the core makes progress, and which requests were in the steps that were executing.

The page has one writer and any number of readers, kept consistent by a seqlock: the writer makes the sequence number
odd before a write and even after it, and a reader repeats a reading during which the number was odd or changed.
"""

import mmap
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_mp.core_link.core_description import CoreDescription
from vllm_mp.core_link.core_status import (
    AWAKE,
    CoreState,
    CoreStatus,
    OutsideTask,
    SleepState,
    StepRequests,
    Suspension,
)
from vllm_mp.machine.file_owner import trusted_owners
from vllm_mp.machine.page_file import make_page_file
from vllm_mp.requests.lora_request import AdapterRecord
from vllm_mp.wire import (
    MAX_CLIENTS,
    MAX_CONVICTED_DEATHS,
    NO_DIGEST,
    PAUSE_MODES,
    SLEEP_LEVELS,
    SLEEP_TAGS,
    TOKEN_BYTES,
    ModelDigest,
)

_MAGIC_OF_VERSION_0 = 0x564D_5053_0000
VERSION = 9
"""Version of the layout of the page."""
_MAGIC = _MAGIC_OF_VERSION_0 + VERSION
_HEADER_BYTES = 4096
MAX_STEP_REQUESTS = 65_536
"""Maximum number of requests on the page; further requests of the steps are left out."""
_WRITE_TIMEOUT_S = 0.1
"""Longest wait of a reader for a writer. A write takes microseconds, but the writer may lose the processor in it."""
_REQUEST_BYTES = 12
"""Three int32: client, slot, number of output tokens."""
_CALLS_AT = 64
"""Position of the noted calls among the 64-bit fields of the header."""
MAX_NOTED_CALLS = 64
_CONVICTED_AT = _CALLS_AT + MAX_NOTED_CALLS
"""Position of the incarnations of `note_convicted` among the fields of the header; 0 is none."""
_CLIENT = np.dtype([("next_number", "<u8"), ("token", "u1", (TOKEN_BYTES,))])
"""A row of the table of clients: the client's number plus 1, or 0 if the row is free; and the client's token."""
_CLIENTS_OFFSET = _HEADER_BYTES + _REQUEST_BYTES * MAX_STEP_REQUESTS
_ADAPTERS_OFFSET = _CLIENTS_OFFSET + _CLIENT.itemsize * MAX_CLIENTS
MAX_ADAPTER_BYTES = 2**18
"""Maximum size of the records of the known adapters on the page."""
_TASK = np.dtype([("client", "<i8"), ("id", "<i8"), ("progress", "<i8")])
"""An entry of the list of tasks, as in `OutsideTask`; the progress of a call is `_CALL`."""
_CALL = -(2**63)
MAX_OUTSIDE_TASKS = 4096
"""Maximum number of tasks outside of steps on the page; further ones are left out."""
_TASKS_OFFSET = _ADAPTERS_OFFSET + 2 * MAX_ADAPTER_BYTES
DIGEST_BYTES = 16
"""Size of the digest of a constraint, of all that its grammar depends on."""
MAX_TRIED = 512
"""Number of the latest tried constraints that are on the page, as digests."""
_TRIED_OFFSET = _TASKS_OFFSET + 2 * _TASK.itemsize * MAX_OUTSIDE_TASKS
_DESCRIPTION_OFFSET = _TRIED_OFFSET + DIGEST_BYTES * MAX_TRIED
_MAX_DESCRIPTION_BYTES = 2**16
_MODEL_OFFSET = _DESCRIPTION_OFFSET + _MAX_DESCRIPTION_BYTES
_MAX_MODEL_BYTES = 256
_SIZE = _MODEL_OFFSET + _MAX_MODEL_BYTES


class _Field:
    """Positions of the page's 64-bit header fields; no members of an enum, which take longer to look up."""

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
    """One bit for each tag of `SLEEP_TAGS`, in that order."""
    GENERATION = 16
    PAUSE = 17
    """1 + the index of the mode in `PAUSE_MODES`; 0: not paused."""
    NUM_DRAINING = 18
    NUM_CALLS = 19
    OUTSIDE_SIGNAL = 20
    ADAPTERS = 21
    """Two times the size in bytes of the records of adapters, plus the number of the half that holds them, 0 or 1.

    0: none were noted. The other half is written first, so that a core that is killed leaves complete records."""
    DESCRIPTION = 22
    """Size in bytes of the description; 0: it is not known yet, or does not fit on the page."""
    OUTSIDE_TASKS = 23
    """Two times the number of tasks outside of steps, plus the number of the half that lists them, as for `ADAPTERS`"""
    HANDLED_CLIENT = 24
    """1 + the client whose message is handled; 0: none is. The next two belong to it."""
    HANDLED_ID = 25
    HANDLED_PROGRESS = 26
    NUM_TRIED = 27
    """Number of tried constraints that were noted; the latest `MAX_TRIED` are kept."""
    STEP_TOKENS = 28
    """Tokens that the latest step computes."""
    STEP_LIMIT_NS = 29
    """Time without progress after which the latest step hangs if the process stands still; 0: not known, or no step."""
    STEPS_WAIT = 30
    """1: steps may wait for something outside of the process, such as a device."""
    MODEL = 31
    """Size in bytes of the digests of the model; 0: the core has no weights, or they are being written."""
    COUNT = 32


class StatusPage:
    """The mapped page: the core makes it with `create`, its readers map it with `open`."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._write_timeout_s = _WRITE_TIMEOUT_S
        self._written = StepRequests(*[np.zeros(0, np.uint32)] * 3)
        """The requests that were written last, whose arrays must not have been changed if they are written again."""
        self._header: npt.NDArray[np.int64] = np.frombuffer(memory, np.int64, count=_HEADER_BYTES // 8)
        self._step_requests: npt.NDArray[np.int32] = np.frombuffer(
            memory, np.int32, count=3 * MAX_STEP_REQUESTS, offset=_HEADER_BYTES
        ).reshape(-1, 3)
        self._clients: npt.NDArray[np.void] = np.frombuffer(memory, _CLIENT, count=MAX_CLIENTS, offset=_CLIENTS_OFFSET)
        self._adapters: npt.NDArray[np.uint8] = np.frombuffer(
            memory, np.uint8, count=2 * MAX_ADAPTER_BYTES, offset=_ADAPTERS_OFFSET
        ).reshape(2, -1)
        self._tasks: npt.NDArray[np.void] = np.frombuffer(
            memory, _TASK, count=2 * MAX_OUTSIDE_TASKS, offset=_TASKS_OFFSET
        ).reshape(2, -1)
        tried = np.frombuffer(memory, np.uint8, count=DIGEST_BYTES * MAX_TRIED, offset=_TRIED_OFFSET)
        self._tried: npt.NDArray[np.uint8] = tried.reshape(MAX_TRIED, DIGEST_BYTES)
        self._description: npt.NDArray[np.uint8] = np.frombuffer(
            memory, np.uint8, count=_MAX_DESCRIPTION_BYTES, offset=_DESCRIPTION_OFFSET
        )
        self._model: npt.NDArray[np.uint8] = np.frombuffer(
            memory, np.uint8, count=_MAX_MODEL_BYTES, offset=_MODEL_OFFSET
        )

    @classmethod
    def create(cls, path: str | None, incarnation: int) -> "StatusPage":
        """Make an empty page at `path` that only its owner can read; without a path, in this process's memory only.

        Raises ValueError as `make_page_file` does.
        """
        page = cls(mmap.mmap(-1, _SIZE) if path is None else make_page_file(path, _SIZE))
        page._header[_Field.INCARNATION] = incarnation
        page._header[_Field.PID] = os.getpid()
        page.enter(CoreState.STARTING)
        page._header[_Field.MAGIC] = _MAGIC
        return page

    @classmethod
    def open(cls, path: Path) -> "StatusPage | None":
        """Map the page at `path` for reading; return None while there is no complete page that this user may read.

        A page of another user counts as none: by truncating the file its owner could end every process that maps it.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except (FileNotFoundError, PermissionError):
            return None
        try:
            info = os.fstat(descriptor)
            if info.st_size < _SIZE or info.st_uid not in trusted_owners():
                return None
            page = cls(mmap.mmap(descriptor, _SIZE, prot=mmap.PROT_READ))
        finally:
            os.close(descriptor)
        return page if page._header[_Field.MAGIC] == _MAGIC else None

    @staticmethod
    def version_at(path: Path) -> int | None:
        """Return the version of the page at `path`, which `open` refuses unless it is `VERSION`; None without a page.

        Raises OSError if the file cannot be read.
        """
        with path.open("rb") as file:
            version = int.from_bytes(file.read(8), sys.byteorder) - _MAGIC_OF_VERSION_0
        return version if 0 < version < 2**16 else None

    def enter(self, state: CoreState, load_progress: float = 0.0) -> None:
        """Publish that the core has entered `state`, and beat.

        The requests of a step that has not ended stay on the page: that step may have ended the core.
        """
        header = self._header
        header[_Field.SEQUENCE] += 1
        header[_Field.STATE] = state
        header[_Field.LOAD_PERMILLE] = int(load_progress * 1000)
        header[_Field.HEARTBEAT_NS] = header[_Field.STATE_SINCE_NS] = time.monotonic_ns()
        header[_Field.SEQUENCE] += 1

    def beat(self) -> None:
        """Publish that the core is alive."""
        self._header[_Field.HEARTBEAT_NS] = time.monotonic_ns()

    def describe(self, description: CoreDescription) -> None:
        """Publish what the core says of itself; call this once."""
        data = msgspec.msgpack.encode(description)
        if len(data) <= _MAX_DESCRIPTION_BYTES:
            self._description[: len(data)] = np.frombuffer(data, np.uint8)
            self._header[_Field.DESCRIPTION] = len(data)

    @property
    def description(self) -> CoreDescription | None:
        """What the core says of itself; None if it is not known."""
        data = self._description[: int(self._header[_Field.DESCRIPTION])].tobytes()
        return msgspec.msgpack.decode(data, type=CoreDescription) if data else None

    def note_model(self, digest: ModelDigest) -> None:
        """Publish the digests of the model that the core has loaded; `NO_DIGEST`: it has no weights."""
        self._header[_Field.MODEL] = 0
        if digest != NO_DIGEST:
            data = msgspec.msgpack.encode(digest)
            self._model[: len(data)] = np.frombuffer(data, np.uint8)
            self._header[_Field.MODEL] = len(data)

    @property
    def model(self) -> ModelDigest:
        """The digests of the model that the core has loaded; `NO_DIGEST` if it has no weights, or they are unknown."""
        data = self._model[: max(0, int(self._header[_Field.MODEL]))].tobytes()
        try:
            return msgspec.msgpack.decode(data, type=ModelDigest) if data else NO_DIGEST
        except (msgspec.MsgspecError, UnicodeDecodeError):  # only a core with corrupted memory can have left it
            return NO_DIGEST

    @property
    def num_clients(self) -> int:
        """Number of clients of the core."""
        return int(np.count_nonzero(self._clients["next_number"]))

    def note_suspension(self, suspension: Suspension) -> None:
        """Publish the pause and the sleep in force, and the latest calls, at most `MAX_NOTED_CALLS`."""
        header, sleep, calls = self._header, suspension.sleep, suspension.calls
        header[_Field.SEQUENCE] += 1
        header[_Field.GENERATION] = suspension.generation
        header[_Field.PAUSE] = PAUSE_MODES.index(suspension.pause) + 1 if suspension.pause else 0
        header[_Field.NUM_DRAINING] = suspension.num_draining
        header[_Field.SLEEP_LEVEL] = sleep.level
        header[_Field.MISSING] = sum(1 << SLEEP_TAGS.index(tag) for tag in sleep.missing)
        header[_Field.NUM_CALLS] = len(calls)
        header[_CALLS_AT : _CALLS_AT + len(calls)] = calls
        header[_Field.SEQUENCE] += 1

    def note_client(self, client: int, token: bytes) -> None:
        """Publish the token of the client with the number `client`, unless all rows are taken."""
        for row in np.flatnonzero(self._clients["next_number"] == 0)[:1]:
            self._clients["token"][row] = np.frombuffer(token.ljust(TOKEN_BYTES, b"\0"), np.uint8)
            self._clients["next_number"][row] = client + 1

    def forget_client(self, client: int) -> None:
        """Remove a client that has left; no-op for a client that is not on the page."""
        self._clients["next_number"][self._clients["next_number"] == client + 1] = 0

    def tokens(self) -> dict[int, bytes]:
        """Return the token of each client by the client's number; call this only after the core's end."""
        taken = self._clients[self._clients["next_number"] != 0]
        return {int(row["next_number"]) - 1: row["token"].tobytes() for row in taken}

    def note_adapters(self, records: Sequence[AdapterRecord]) -> None:
        """Publish the known adapters; the last of them are left out if they do not fit on the page."""
        data = msgspec.msgpack.encode(records)
        while len(data) > MAX_ADAPTER_BYTES:
            records = records[: len(records) * MAX_ADAPTER_BYTES // len(data)]
            data = msgspec.msgpack.encode(records)
        half = 1 - int(self._header[_Field.ADAPTERS]) % 2
        self._adapters[half, : len(data)] = np.frombuffer(data, np.uint8)
        self._header[_Field.ADAPTERS] = 2 * len(data) + half

    def adapters(self) -> list[AdapterRecord] | None:
        """Return the known adapters; None if they were not noted."""
        while True:
            noted = int(self._header[_Field.ADAPTERS])
            size, half = divmod(noted, 2)
            if not size:
                return None
            data = self._adapters[half, :size].tobytes()
            if self._header[_Field.ADAPTERS] == noted:  # else a core that lives may have written over them meanwhile
                return msgspec.msgpack.decode(data, type=list[AdapterRecord])

    def note_tried(self, digest: bytes) -> None:
        """Publish the digest of a constraint that has passed its trial and was compiled."""
        count = int(self._header[_Field.NUM_TRIED])
        self._tried[count % MAX_TRIED] = np.frombuffer(digest, np.uint8)
        self._header[_Field.NUM_TRIED] = count + 1

    def tried(self) -> list[bytes]:
        """Return the digests of the latest constraints that have passed their trials, the earliest first.

        Call this only after the core's end.
        """
        count = int(self._header[_Field.NUM_TRIED])
        return [self._tried[number % MAX_TRIED].tobytes() for number in range(max(0, count - MAX_TRIED), count)]

    def note_outside(self, tasks: Sequence[OutsideTask]) -> None:
        """Publish what the core does outside of steps, replacing what was published; threads must take turns."""
        rows = [(client, id, _CALL if progress is None else progress) for client, id, progress in tasks]
        half = 1 - int(self._header[_Field.OUTSIDE_TASKS]) % 2
        count = min(len(rows), MAX_OUTSIDE_TASKS)
        self._tasks[half, :count] = rows[:count]
        self._header[_Field.OUTSIDE_TASKS] = 2 * count + half

    def begin_message(self, task: OutsideTask) -> None:
        """Publish the request whose message the core's thread handles, until `end_message`."""
        assert task.progress is not None, "calls are published by `note_outside`"
        header = self._header
        header[_Field.HANDLED_ID] = task.id
        header[_Field.HANDLED_PROGRESS] = task.progress
        header[_Field.HANDLED_CLIENT] = task.client + 1

    def end_message(self) -> None:
        """Publish that no message of a request is handled."""
        self._header[_Field.HANDLED_CLIENT] = 0

    def _outside_tasks(self, fields: list[int]) -> tuple[OutsideTask, ...]:
        """Return what the core does outside of steps, which may be torn unless the core has ended."""
        count, half = divmod(fields[_Field.OUTSIDE_TASKS], 2)
        rows = self._tasks[half, : max(0, count)].tolist()
        tasks = [OutsideTask(client, id, None if progress == _CALL else progress) for client, id, progress in rows]
        if fields[_Field.HANDLED_CLIENT]:
            client, id, progress = fields[_Field.HANDLED_CLIENT : _Field.HANDLED_PROGRESS + 1]
            tasks.append(OutsideTask(client - 1, id, progress))
        return tuple(tasks)

    def note_convicted(self, deaths: Iterable[int]) -> None:
        """Publish the incarnations of cores for whose deaths a request is to blame; beyond 64, the first are kept."""
        noted = self._header[_CONVICTED_AT : _CONVICTED_AT + MAX_CONVICTED_DEATHS]
        for incarnation in deaths:
            if incarnation not in noted:
                noted[np.flatnonzero(noted == 0)[:1]] = incarnation

    def convicted(self) -> list[int]:
        """Return the incarnations of `note_convicted`; call this only after the core's end."""
        noted = self._header[_CONVICTED_AT : _CONVICTED_AT + MAX_CONVICTED_DEATHS]
        return [int(incarnation) for incarnation in noted[noted != 0]]

    @property
    def outside_signal(self) -> npt.NDArray[np.int64]:
        """[1] The field of `CoreStatus.outside_signal`, for a signal handler to write."""
        return self._header[_Field.OUTSIDE_SIGNAL : _Field.OUTSIDE_SIGNAL + 1]

    def note_outside_signal(self, number: int) -> None:
        """Publish the signal by which another process has ended or stopped a rank, which is the end of the core."""
        self._header[_Field.OUTSIDE_SIGNAL] = number

    def note_waits(self) -> None:
        """Publish that steps may wait for something outside of the process, such as a device or another rank."""
        self._header[_Field.STEPS_WAIT] = 1

    @property
    def steps_wait(self) -> bool:
        """Whether steps may wait for something outside of the process."""
        return bool(self._header[_Field.STEPS_WAIT])

    @property
    def step_limit_s(self) -> float:
        """Time without progress after which the step hangs if its process stands still; 0: not known, or no step."""
        return float(self._header[_Field.STEP_LIMIT_NS]) / 1e9

    def begin_step(self, step: int, requests: StepRequests, num_tokens: int = 0, limit_ns: int = 0) -> None:
        """Publish `requests`: the requests of the step about to execute and of the steps that are still executing.

        The step computes `num_tokens`; `limit_ns` is as for `step_limit_s`, in nanoseconds.
        """
        header = self._header
        header[_Field.SEQUENCE] += 1
        self._write_requests(requests)
        header[_Field.STATE] = CoreState.STEPPING
        header[_Field.STEP] = step
        header[_Field.STEP_TOKENS] = num_tokens
        header[_Field.STEP_LIMIT_NS] = limit_ns
        header[_Field.HEARTBEAT_NS] = header[_Field.STATE_SINCE_NS] = time.monotonic_ns()
        header[_Field.SEQUENCE] += 1

    def end_step(
        self, num_running: int, num_waiting: int, free_blocks: int, total_blocks: int, left: StepRequests | None = None
    ) -> int:
        """Publish the scheduler's counts, and remove all requests but those `left` in steps that are executing.

        Return the time, in nanoseconds of `time.monotonic_ns()`.
        """
        header = self._header
        header[_Field.SEQUENCE] += 1
        if left is None:
            header[_Field.NUM_STEP_REQUESTS] = 0
            header[_Field.STATE] = CoreState.IDLE
        else:
            self._write_requests(left)
        header[_Field.NUM_RUNNING] = num_running
        header[_Field.NUM_WAITING] = num_waiting
        header[_Field.FREE_BLOCKS] = free_blocks
        header[_Field.TOTAL_BLOCKS] = total_blocks
        header[_Field.STEP_LIMIT_NS] = 0
        now = time.monotonic_ns()
        header[_Field.HEARTBEAT_NS] = header[_Field.STATE_SINCE_NS] = now
        header[_Field.SEQUENCE] += 1
        return now

    def _write_requests(self, requests: StepRequests) -> None:
        """Write what fits on the page; the caller holds the sequence number odd."""
        count = min(len(requests.slots), MAX_STEP_REQUESTS)
        if requests.slots is not self._written.slots or requests.clients is not self._written.clients:
            self._written = requests
            self._step_requests[:count, 0] = requests.clients[:count]
            self._step_requests[:count, 1] = requests.slots[:count]
        self._step_requests[:count, 2] = requests.num_output_tokens[:count]
        self._header[_Field.NUM_STEP_REQUESTS] = count

    @property
    def state(self) -> CoreState:
        """The core's state, without the cost of a whole reading."""
        return _state(int(self._header[_Field.STATE]))

    def progress(self) -> tuple[int, int]:
        """Return the step and the time of the last beat: the pair changes whenever the core makes progress."""
        return int(self._header[_Field.STEP]), int(self._header[_Field.HEARTBEAT_NS])

    def note_end_of_writer(self) -> None:
        """Wait for no write any more, because the process of the core has ended."""
        self._write_timeout_s = 0.0

    def read(self) -> CoreStatus:
        """Return a consistent reading; if the writer was killed during a write, the torn page after 0.1 s.

        After `note_end_of_writer` it is returned at once.
        """
        deadline = time.monotonic() + self._write_timeout_s
        while True:
            before = int(self._header[_Field.SEQUENCE])
            fields = self._header[: _Field.COUNT].tolist()
            requests = self._step_requests[: fields[_Field.NUM_STEP_REQUESTS]].tolist()
            calls = self._header[_CALLS_AT : _CALLS_AT + MAX_NOTED_CALLS].tolist()
            if before % 2 == 0 and before == self._header[_Field.SEQUENCE]:
                break
            if time.monotonic() >= deadline:
                break
            time.sleep(1e-5)  # yields this processor to a writer that waits for it
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
            suspension=Suspension(
                generation=fields[_Field.GENERATION],
                pause=dict(enumerate(PAUSE_MODES, 1)).get(fields[_Field.PAUSE], ""),
                num_draining=max(0, fields[_Field.NUM_DRAINING]),
                sleep=_sleep(fields[_Field.SLEEP_LEVEL], fields[_Field.MISSING]),
                calls=tuple(calls[: max(0, fields[_Field.NUM_CALLS])]),
            ),
            outside_signal=fields[_Field.OUTSIDE_SIGNAL],
            outside_tasks=self._outside_tasks(fields),
            num_step_tokens=fields[_Field.STEP_TOKENS],
        )


def _sleep(level: int, bits: int) -> SleepState:
    """Return the state; `AWAKE` for values that only a core with corrupted memory can have left on the page."""
    missing = tuple(tag for i, tag in enumerate(SLEEP_TAGS) if bits >> i & 1)
    return SleepState(level, missing) if missing and level in SLEEP_LEVELS else AWAKE


def _state(value: int) -> CoreState:
    """Return the state; STOPPED for a value that only a core with corrupted memory can have left on the page."""
    return CoreState(value) if value in set(CoreState) else CoreState.STOPPED
