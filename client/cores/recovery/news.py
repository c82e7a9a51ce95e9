"""News of a core for its client: a death, the next core, an absence, or the end."""

from typing import NamedTuple

from vllm_mp.client.cores.sources.core_source import Core


class Death(NamedTuple):
    """The core has died; its successor is being started, unless `num_restarts_left` is negative."""

    cause: str
    in_step: dict[int, int]
    """The progress of each request of this client in the step that was executing, or for which the core did something
    outside of steps, by slot: the number of its output tokens, or minus the number of prompt tokens that were left."""
    num_in_step: int
    """These requests of all clients, and the calls that were carried out."""
    is_from_outside: bool
    """Another process killed or stopped the core, which no request can have caused.

    Also true for a shared core, until its successor says more.
    """
    kind: str = "connection"
    """"exit", "signal", "hang", "out_of_memory", "replaced", or "connection" if nothing else is known."""
    time: float = 0.0
    """When the death was seen, in seconds of `time.monotonic()`."""
    is_step_known: bool = True
    """False: `in_step` is empty because it is unknown which requests were in the step."""
    incarnation: int = 0
    """The incarnation of the core that died."""
    num_restarts_left: int | None = None
    """Number of further deaths that a successor follows; -1: none follows this one; None: any number, or unknown."""

    calls: tuple[int, ...] = ()
    """The ids of this client's calls that were carried out."""

    @property
    def is_final(self) -> bool:
        """No successor follows."""
        return self.num_restarts_left is not None and self.num_restarts_left < 0


class End(NamedTuple):
    """The core is gone for good; there is no successor."""

    cause: str
    death: Death | None = None
    """The death that no successor follows; None if it was news before, because a successor was to follow."""


class Absence(NamedTuple):
    """There is still no shared core; the supervisor goes on trying."""

    cause: str
    limit_s: float
    """Seconds that a request waits for a core."""


News = Death | Core | End | Absence
