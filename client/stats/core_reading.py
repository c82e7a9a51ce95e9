"""The load of a core, as its clients know it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class CoreReading(NamedTuple):
    """The load of a core, over all its clients, when it was last asked."""

    incarnation: int
    num_running: int
    num_waiting: int
    free_blocks: int
    total_blocks: int
    num_preemptions: int
    num_dropped_messages: int
    is_paused: bool
    is_sleeping: bool

    @classmethod
    def of(cls, incarnation: int, status: Mapping[str, Any]) -> "CoreReading":
        """Return what the reply to the operation "status" says; a field that it lacks is 0."""
        return cls(incarnation, *(status.get(name, 0) for name in cls._fields[1:]))

    @classmethod
    def total(cls, readings: "Sequence[CoreReading]") -> "CoreReading | None":
        """Return the load of several cores together, with the incarnation of the first; None without any."""
        if len(readings) < 2:
            return readings[0] if readings else None
        sums = {name: sum(getattr(reading, name) for reading in readings) for name in cls._fields[1:]}
        any_of = {name: any(getattr(reading, name) for reading in readings) for name in ("is_paused", "is_sleeping")}
        return cls(**{"incarnation": readings[0].incarnation} | sums | any_of)

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV cache's blocks in use, 0 to 1."""
        return 1 - self.free_blocks / self.total_blocks if self.total_blocks else 0.0
