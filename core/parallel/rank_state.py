"""What a core knows of each of its other ranks, and what it needs of the ranks of a machine."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:  # it imports torch, and a core has to bind its address first
    from vllm_mp.core.parallel.messages import FromRank

PATIENCE: Final = 0.8
"""Share of the time after which the supervisor ends the core that ranks and rank hosts get. So the core itself can say
which of them hangs or is missing."""


_MAX_UNREAD: Final = 8
"""More messages than a rank sends while the core waits for something else."""


class WorkerFailedError(Exception):
    """Raised when a rank has ended, hangs or sends an invalid message; the core cannot continue.

    It is not a RuntimeError, because parts of a core go on after one.
    """

    def __init__(self, reason: str, outside_signal: int = 0) -> None:
        """`outside_signal`: number of the signal by which another process ended or stopped the rank; 0: none."""
        super().__init__(reason)
        self.outside_signal = outside_signal


class RankState:
    """One rank other than rank 0."""

    def __init__(self, rank: int, stage: int | None, node: str = "") -> None:
        """`stage` is None if there is only one. `node` names the machine of the rank if it is not the core's."""
        self.rank = rank
        self.stage = stage
        self.node = node
        self.pid = 0
        """The process of the rank on its machine; 0 until it is known."""
        self.unread: list[FromRank] = []
        """Messages of the rank that the core has not processed."""
        self.num_beats = 0
        """A number that grows while the rank makes progress."""
        self.num_seen = 0
        """The number of beats when the core last looked."""
        self.still_s = 0.0
        """Seconds without progress, at the last check by the core."""
        self.stopped_s = 0.0
        """Seconds of them during which a signal had stopped the process, without a break."""

    def is_stopped(self) -> bool:
        """Return whether a signal has stopped the process; False on another machine, which does not tell."""
        return False

    def note(self, said: "FromRank") -> None:
        """Append a message of the rank to `unread`; raise WorkerFailedError if there are too many."""
        if len(self.unread) == _MAX_UNREAD:
            raise WorkerFailedError(f"{self.name} says more than it was asked: {type(said).__name__}")
        self.unread.append(said)

    @property
    def name(self) -> str:
        facts = {f"stage {self.stage}": self.stage is not None, self.node: self.node, f"process {self.pid}": self.pid}
        return f"rank {self.rank} ({', '.join(text for text, is_known in facts.items() if is_known)})"


class RankSource(Protocol):
    """Ranks that the core reaches in one way: processes of its machine, or the rank hosts of other machines."""

    @property
    def ranks(self) -> Sequence[RankState]:
        """The ranks in their order; empty after `close`."""
        ...

    @property
    def descriptors(self) -> list[int]:
        """Descriptors that become readable when a rank says something or ends."""
        ...

    def write(self, parts: Sequence[bytes], check: Callable[[], None]) -> None:
        """Send the ranks a message made of `parts`; `check` is called while this waits for room, and may raise.

        Raises ValueError for a message that is too long.
        """
        ...

    def receive(self) -> None:
        """Read the messages of the ranks, and their beats, into `ranks`.

        Raises WorkerFailedError if a rank has ended or failed, and ValueError for a mistake in the configuration.
        """
        ...

    def close(self, at_once: bool = False) -> None:
        """End all ranks, by force `at_once` or if they have not ended after 2 seconds; idempotent."""
        ...
