"""The load of a core, as its clients know it."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
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
    num_drafts: int = 0
    """Rows of steps that had draft tokens, as counted by the present core; 0 without speculation, as the next ones."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: Sequence[int] = ()
    """Accepted drafts that were the first, second, ... of their row; empty without speculation."""
    sleep_level: int = 0
    """1: the core keeps its weights in host memory while it sleeps; 2: it has dropped them."""

    @classmethod
    def of(cls, incarnation: int, status: Mapping[str, Any]) -> "CoreReading":
        """Return what the reply to the operation "status" says; a field that it lacks is 0."""
        values = {name: status.get(name, cls._field_defaults.get(name, 0)) for name in cls._fields[1:]}
        return cls(incarnation, **values)

    @classmethod
    def total(cls, readings: "Sequence[CoreReading]") -> "CoreReading | None":
        """Return the load of several cores together, with the incarnation of the first; None without any."""
        if len(readings) < 2:
            return readings[0] if readings else None
        per_pos = "num_accepted_tokens_per_pos"
        names = [name for name in cls._fields[1:] if name != per_pos]
        sums = {name: sum(getattr(reading, name) for reading in readings) for name in names}
        any_of = {name: any(getattr(reading, name) for reading in readings) for name in ("is_paused", "is_sleeping")}
        columns = zip_longest(*(reading.num_accepted_tokens_per_pos for reading in readings), fillvalue=0)
        other: dict[str, Any] = {
            "incarnation": readings[0].incarnation,
            "sleep_level": max(reading.sleep_level for reading in readings),
            per_pos: [sum(column) for column in columns],
        }
        return cls(**sums | any_of | other)

    @property
    def accepted_drafts(self) -> float | None:
        """Share of the draft tokens that were accepted, 0 to 1; None if there were none."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV cache's blocks in use, 0 to 1."""
        return 1 - self.free_blocks / self.total_blocks if self.total_blocks else 0.0
