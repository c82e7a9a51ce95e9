"""The load of a core, as its clients know it."""

from collections.abc import Mapping
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

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV cache's blocks in use, 0 to 1."""
        return 1 - self.free_blocks / self.total_blocks if self.total_blocks else 0.0
