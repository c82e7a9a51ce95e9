"""The interface of stat loggers, as vLLM defines it, and the base of the engine's own."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from vllm_mp.client.stat_loggers.readings import EngineReadings
from vllm_mp.client.stats import IterationStats, SchedulerStats
from vllm_mp.config import VllmConfig

StatLoggerFactory = Callable[[VllmConfig, int], Any]
"""Makes a logger of a configuration and an engine index: usually a class. One logger records all cores, so it is 0."""
StatLoggerArgument = Sequence[StatLoggerFactory] | Mapping[str, Any] | None
"""What `stat_loggers` may be: factories, or loggers by name."""


class StatLoggerBase:
    """A logger of statistics; a derived class replaces the methods that it needs.

    The methods are called one after another, in a thread of the logger's own. A logger need not derive from this class.
    """

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.vllm_config = vllm_config
        self.engine_index = engine_index

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Take in what has happened since the last call, at most ten times a second; no call if nothing has.

        `scheduler_stats` is None while the load of the core is unknown, `mm_cache_stats` is always None.
        """

    def log_engine_initialized(self) -> None:
        """Take note that the engine serves; called once, before any other method."""

    def log(self) -> None:
        """Write what was recorded; called by `do_log_stats`, and every 10 seconds while tokens arrive."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Take note of a sleep (1 and its level) or of its end (0 and 0) that this client asked for."""


class AggregateStatLoggerBase(StatLoggerBase):
    """A logger whose class is called with a list of engine indexes, here [0], instead of one index."""

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None:
        super().__init__(vllm_config, engine_indexes[0])
        self.engine_indexes = engine_indexes


class CounterLogger(StatLoggerBase):
    """A logger that reads the engine's counters, and needs no records."""

    default_name: ClassVar[str]
    """The name of a logger of this class that was not given a name."""
    _engine: EngineReadings

    def attach(self, engine: EngineReadings) -> None:
        """Read the counters of `engine` from now on; called before any other method."""
        self._engine = engine

    def detach(self) -> None:
        """End the use of the counters: the logger was removed, or the engine has ended."""

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Ignore the record. It is made only if a derived class replaces this method."""
