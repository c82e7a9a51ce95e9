"""The constraints that are being compiled, and the threads that compile them, in turns of their owners."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_mp.core_link.core_status import OutsideTask
from vllm_mp.requests.structured_outputs import Constraint

_STOP_S = 0.5
"""Time for which a lane that is stopped waits for its thread."""
_STACK_BYTES = 2**23
"""Stack of a thread that compiles, more than the trial of a constraint has."""

WaiterKey = tuple[int, int]
"""(client, slot) of a request."""


class Waiter(NamedTuple):
    """A request that waits for its grammar."""

    task: OutsideTask
    """The request, as the status page names it."""
    owner: Hashable
    """Whose turn it is when its constraint is compiled."""
    group: tuple[int, int] | None = None
    """The group of a suspect; None: it is no suspect."""
    is_replay: bool = False
    """An earlier core has admitted the request, so the limits on new requests do not apply."""

    @property
    def key(self) -> WaiterKey:
        return self.task.client, self.task.id


@dataclass(eq=False, slots=True)
class Job:
    """A constraint that is being compiled, and the requests that wait for it."""

    constraint: Constraint
    waiters: dict[WaiterKey, Waiter] = field(default_factory=dict)
    """Only the core's thread changes it. Empty: no request needs the grammar."""
    num_killed: int = 0
    """Number of its trials that were killed. Only the thread that does the job changes it."""

    def owners(self) -> set[Hashable]:
        """Return the owners of the requests that wait."""
        return {waiter.owner for waiter in list(self.waiters.values())}

    @property
    def is_replay(self) -> bool:
        return any(waiter.is_replay for waiter in list(self.waiters.values()))

    def is_needed(self) -> bool:
        """Return whether a request still waits."""
        return bool(self.waiters)

    def tasks(self) -> tuple[list[OutsideTask], bool]:
        """Return the requests to name while the grammar is made, and whether all other work must stop meanwhile.

        All other work stops if each of them is a suspect; then those of one group are named.
        """
        waiters = list(self.waiters.values())
        groups = {waiter.group for waiter in waiters if waiter.group is not None}
        if len(groups) == 0 or any(waiter.group is None for waiter in waiters):
            return [waiter.task for waiter in waiters], False
        first = min(groups)
        return [waiter.task for waiter in waiters if waiter.group == first], True


class JobQueue:
    """Jobs that wait. Owners take turns; a job of several owners is done at the first of their turns."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[Hashable, dict[Job, None]] = OrderedDict()
        """By owner, the next to have a turn first; no owner is without jobs."""

    def __len__(self) -> int:
        """Return the number of owners that wait for a turn."""
        return len(self._jobs)

    def __contains__(self, job: Job) -> bool:
        return any(job in jobs for jobs in self._jobs.values())

    def add(self, job: Job) -> None:
        """Add a job for each of its owners; no-op for those that it was added for."""
        for owner in job.owners():
            self._jobs.setdefault(owner, {})[job] = None

    def remove(self, job: Job, kept: Collection[Hashable] = ()) -> None:
        """Remove a job, but not for the owners `kept`; no-op if it is not here."""
        for owner in [owner for owner, jobs in self._jobs.items() if job in jobs and owner not in kept]:
            del self._jobs[owner][job]
            if not self._jobs[owner]:
                del self._jobs[owner]

    def take(self) -> Job | None:
        """Remove and return the next job; None if there is none."""
        if not self._jobs:
            return None
        owner = next(iter(self._jobs))
        job = next(iter(self._jobs[owner]))
        self._jobs.move_to_end(owner)
        self.remove(job)
        return job


class Lane:
    """A thread that does jobs, started when it is first needed."""

    def __init__(self, do: Callable[[Job], None], refuse: Callable[[Job, Exception], None]) -> None:
        """`do` runs in the thread and raises no error. `refuse` is called if the system has no thread left."""
        self._do = do
        self._refuse = refuse
        self._queue = JobQueue()
        self._current: Job | None = None
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._is_stopped = False

    def add(self, job: Job) -> None:
        """Queue a job for each of its present owners; no-op if no request waits for it."""
        with self._changed:
            self._queue.add(job)
            if self._thread is None:
                self._start(job)
            self._changed.notify_all()

    def note_owners(self, job: Job) -> None:
        """Note that the owners of a job have changed, if it is queued here."""
        with self._changed:
            if job in self._queue:
                self._queue.remove(job, kept=job.owners())
                self._queue.add(job)

    def remove(self, job: Job) -> bool:
        """Remove a queued job; return True if it is being done instead."""
        with self._changed:
            self._queue.remove(job)
            return self._current is job

    def wait(self, seconds: float) -> None:
        """Wait in the lane's thread, at most until it is stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped, seconds)

    def stop(self) -> bool:
        """End the thread; return False if it is still busy."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        if self._thread is None:
            return True
        self._thread.join(_STOP_S)
        return not self._thread.is_alive()

    def _start(self, job: Job) -> None:
        self._thread = threading.Thread(target=self._run, name="compile-grammars", daemon=True)
        before = threading.stack_size(_STACK_BYTES)
        try:
            self._thread.start()
        except RuntimeError as error:  # that must not end the core
            self._thread = None
            self._queue.remove(job)
            self._refuse(job, error)
        finally:
            threading.stack_size(before)

    def _next(self) -> Job | None:
        """Wait for the next job and return it; None when the lane is stopped."""
        with self._changed:
            self._current = None
            self._changed.wait_for(lambda: self._is_stopped or len(self._queue) > 0)
            self._current = None if self._is_stopped else self._queue.take()
            return self._current

    def _run(self) -> None:
        while (job := self._next()) is not None:
            self._do(job)
