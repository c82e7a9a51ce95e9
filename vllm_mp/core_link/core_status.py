"""What a core says of itself on its status page, as plain values."""

import enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class CoreState(enum.IntEnum):
    """What the core is doing."""

    STARTING = 0
    """It imports its modules and reads its configuration."""
    LOADING = 1
    """It loads weights and allocates the KV cache."""
    IDLE = 2
    """It serves, and no step is executing."""
    STEPPING = 3
    """A step is executing."""
    STOPPED = 4
    """It has ended, or is about to."""
    WAITING = 5
    """It has loaded its weights, and waits until it takes over from the core before it."""


class SleepState(NamedTuple):
    """The level of a core's sleep, and the memory that it has released."""

    level: int
    """Level of the sleep; 0: awake."""
    missing: tuple[str, ...]
    """The tags of `wire.SLEEP_TAGS` whose memory is released; empty if and only if the core is awake."""


AWAKE = SleepState(0, ())


class Suspension(NamedTuple):
    """The pause and the sleep in force. It belongs to the core, and its successor enters it before it serves."""

    generation: int = 0
    """Number of changes of the pause or the sleep, over all incarnations."""
    pause: str = ""
    """The mode of the pause, one of `PAUSE_MODES`; empty: not paused."""
    num_draining: int = 0
    """Requests that arrived before a pause with mode "wait" and have not ended."""
    sleep: SleepState = AWAKE
    calls: tuple[int, ...] = ()
    """The ids of the latest calls that were carried out; of a call that failed, the complement of its id."""


NOT_SUSPENDED = Suspension()


class StepRequests(NamedTuple):
    """The requests of one or several steps, as columns of [n]. No request may occur twice."""

    clients: npt.NDArray[np.uint32]
    slots: npt.NDArray[np.uint32]
    num_output_tokens: npt.NDArray[np.integer]
    """Tokens that each request has generated so far; while its prompt is read, minus the number of prompt tokens that
    are left."""


class OutsideTask(NamedTuple):
    """A request or a call for which the core does something outside of steps."""

    client: int
    id: int
    """The slot of the request, or the id of the call."""
    progress: int | None = None
    """Of a request, as in `StepRequests`; None: a call."""


class CoreStatus(NamedTuple):
    """One consistent reading of the page. Ages are in seconds."""

    incarnation: int
    pid: int
    state: CoreState
    step: int
    heartbeat_age: float
    """Age of the core's last beat; every step and change of state is a beat too."""
    state_age: float
    """Time since the state was entered; while STEPPING, time since a step began or ended."""
    load_progress: float
    """Share of the loading that is done, 0 to 1."""
    num_running: int
    num_waiting: int
    free_blocks: int
    total_blocks: int
    step_requests: list[tuple[int, int, int]]
    """(client index, slot, number of output tokens) of each request in the executing steps; empty between steps. The
    number is as in `StepRequests`."""
    suspension: Suspension = NOT_SUSPENDED
    outside_signal: int = 0
    """Number of the signal that another process sent to the core or one of its other ranks and that is the end of the
    core; 0: none, or the core cannot tell."""
    outside_tasks: tuple[OutsideTask, ...] = ()
    """What the core does outside of steps."""
    num_step_tokens: int = 0
    """Tokens that the latest step computes; 0: not known."""

    @property
    def requests(self) -> list[tuple[int, int, int]]:
        """Return `step_requests`, and in the same form the requests for which the core does something outside of steps.

        None of them occurs twice.
        """
        others = [(task.client, task.id, task.progress) for task in self.outside_tasks if task.progress is not None]
        known = {(client, slot): progress for client, slot, progress in [*others, *self.step_requests]}
        return [(client, slot, progress) for (client, slot), progress in known.items()]

    @property
    def calls(self) -> list[tuple[int, int]]:
        """Return (client index, id) of each call that the core carries out."""
        return list({(task.client, task.id): None for task in self.outside_tasks if task.progress is None})

    def __str__(self) -> str:
        """Return a short line for logs and error messages."""
        return (
            f"{self.state.name} for {self.state_age:.1f} s, step {self.step} with {len(self.step_requests)} requests"
            f"{f' and {self.num_step_tokens} tokens' if self.step_requests and self.num_step_tokens else ''}, "
            f"{f'{len(self.outside_tasks)} tasks outside of steps, ' if self.outside_tasks else ''}"
            f"last beat {self.heartbeat_age:.1f} s ago, {self.num_running} running, {self.num_waiting} waiting, "
            f"{self.free_blocks} of {self.total_blocks} KV blocks free"
            f"{', paused' if self.suspension.pause else ''}"
            f"{f', asleep at level {self.suspension.sleep.level}' if self.suspension.sleep.missing else ''}"
        )
