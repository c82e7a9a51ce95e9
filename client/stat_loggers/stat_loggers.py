"""The stat loggers of an engine, by name."""

import asyncio
import functools
import inspect
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from vllm_mp.client.stat_loggers.base import (
    AggregateStatLoggerBase,
    CounterLogger,
    StatLoggerArgument,
    StatLoggerBase,
    StatLoggerFactory,
)
from vllm_mp.client.stat_loggers.logger_thread import LoggerThread
from vllm_mp.client.stat_loggers.readings import EngineReadings
from vllm_mp.client.stat_loggers.v0 import V0Adapter, is_v0
from vllm_mp.client.stats import CoreReading, IterationStats, SchedulerStats
from vllm_mp.config import VllmConfig

logger = logging.getLogger(__name__)

CALL_LIMIT_S = 5.0
"""Longest call of a logger."""
_RECORD_INTERVAL_S = 0.1
_CLOSE_TIMEOUT_S = 2.0
"""Time that all loggers together get for their last calls when the engine ends."""


class StatLoggers:
    """Calls the loggers of an engine, each in a thread of its own.

    A logger that raises, or whose call takes longer than `CALL_LIMIT_S`, is reported by its name and dropped. No logger
    runs in the event loop. What happens to requests is recorded only while a logger wants records, and handed out by a
    thread that sleeps while nothing happens.

    All methods may be called from any thread.
    """

    def __init__(self, engine: EngineReadings) -> None:
        self._engine = engine
        self._lock = threading.RLock()
        """Held while `_loggers` changes; never taken while statistics are counted."""
        self._delivery = threading.RLock()
        """Held while a record is handed out, so that loggers get the records in their order."""
        self._loggers: dict[str, _NamedLogger] = {}
        self._news = threading.Event()
        """Something has been recorded that was not handed out, or the engine has ended."""
        self._deliverer: threading.Thread | None = None
        self._last_load: CoreReading | None = None
        self._is_closed = False
        engine.stats.add_report(self._begin_log)

    def add(self, name: str, stat_logger: Any) -> None:
        """Call `stat_logger` from now on.

        Raises KeyError if a logger has the name, TypeError if it is not a logger, ValueError if the logger belongs to
        another engine, and RuntimeError after the end of the engine.
        """
        _check_logger(name, stat_logger)
        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"logger {name!r} cannot be added: the engine was shut down")
            if name in self._loggers:
                raise KeyError(f"a logger named {name!r} exists; remove it first, or choose another name")
            named = _NamedLogger(name, stat_logger, self._engine, self._drop)
            self._loggers[name] = named
            if named.wants_records:
                self._begin_records()
        named.call("log_engine_initialized")

    def add_all(self, factories: Mapping[str, Callable[[VllmConfig], Any]]) -> None:
        """Make loggers, which replace any of the same names; a logger that cannot be made is reported and left out."""
        for name, make in factories.items():
            if name in self._loggers:
                self.remove(name)
            try:
                self.add(name, make(self._engine.vllm_config))
            except Exception:
                logger.exception("stat logger %r failed when it was made, and is left out", name)

    def remove(self, name: str) -> None:
        """Stop calling the logger after the calls that wait. Raises KeyError if there is no logger of that name."""
        with self._lock:
            if name not in self._loggers:
                raise KeyError(f"there is no logger named {name!r}; there are: {', '.join(self._loggers) or 'none'}")
            named = self._loggers.pop(name)
            self._end_unused_records()
        named.close()

    async def log(self) -> None:
        """Call `log` of all loggers, and return when all calls have ended; a call that blocks ends with its drop."""
        self._deliver()
        calls = [asyncio.wrap_future(call) for call in self._begin_log()]
        while calls:
            _, unfinished = await asyncio.wait(calls, timeout=CALL_LIMIT_S)
            calls = list(unfinished)
            self._drop_blocked()

    def note_sleep(self, is_asleep: int, level: int) -> None:
        """Tell all loggers of a sleep or of its end."""
        for named in self._all():
            named.call("record_sleep_state", is_asleep, level)

    def close(self) -> None:
        """Hand out the last records, and end all threads; waits for calls that take long up to 2 seconds in all."""
        with self._lock:
            self._is_closed = True
        self._deliver()
        with self._lock:
            loggers, self._loggers = self._loggers, {}
            self._end_unused_records()
            self._news.set()
        for named in loggers.values():
            named.close()
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for named in loggers.values():
            named.thread.join(max(0.0, deadline - time.monotonic()))

    def _all(self) -> "list[_NamedLogger]":
        return list(self._loggers.values())

    def _begin_log(self) -> "list[Future[None]]":
        """Begin to call `log` of all loggers, except those that block, which are dropped."""
        self._drop_blocked()
        return [named.call("log") for named in self._all()]

    def _begin_records(self) -> None:
        """Record what happens, for a logger that was added; hold the lock."""
        self._engine.stats.begin_records(self._news.set)
        if self._deliverer is None:
            self._deliverer = threading.Thread(target=self._run, name="stat-records", daemon=True)
            self._deliverer.start()

    def _end_unused_records(self) -> None:
        """Record no more if no logger wants it; hold the lock."""
        if not any(named.wants_records for named in self._loggers.values()):
            self._engine.stats.end_records()

    def _run(self) -> None:
        """Hand out records while something happens, until the engine ends."""
        while not self._is_closed:
            # A logger that has a call is looked at, so that it is dropped also if nothing happens.
            self._news.wait(CALL_LIMIT_S if any(named.thread.has_calls for named in self._all()) else None)
            time.sleep(_RECORD_INTERVAL_S)
            self._drop_blocked()
            if not any(named.is_behind for named in self._all()):
                self._deliver()

    def _deliver(self) -> None:
        """Hand out what was recorded since the last call."""
        with self._delivery:
            self._news.clear()
            iteration = self._engine.stats.take_record()
            if iteration is None:
                return
            scheduler = self._load(iteration)
            for named in self._all():
                if named.wants_records:
                    named.record(scheduler, iteration)

    def _load(self, iteration: IterationStats) -> SchedulerStats | None:
        """Return the load of the core; add to `iteration` what the core has counted since the last call."""
        if not self._is_closed:
            self._engine.begin_to_ask_core()
        load, last = self._engine.core_load(), self._last_load
        if load is None:
            return None
        counted = last.num_preemptions if last is not None and last.incarnation == load.incarnation else 0
        iteration.num_preempted_reqs = max(0, load.num_preemptions - counted)
        self._last_load = load
        has_adapters = self._engine.vllm_config.lora_config is not None
        waiting, running = self._engine.stats.live_adapters() if has_adapters else ({}, {})
        return SchedulerStats(
            load.num_running,
            load.num_waiting,
            kv_cache_usage=load.kv_cache_usage,
            prefix_cache_stats=iteration.prefix_cache,
            waiting_lora_adapters=waiting,
            running_lora_adapters=running,
        )

    def _drop_blocked(self) -> None:
        for named in self._all():
            if named.thread.drop_if_blocked(CALL_LIMIT_S):
                self._drop(named.thread)

    def _drop(self, thread: LoggerThread) -> None:
        """Forget the logger of `thread`, which makes no more calls."""
        with self._lock:
            named = self._loggers.get(thread.name)
            if named is None or named.thread is not thread:
                return
            del self._loggers[thread.name]
            self._end_unused_records()
        named.detach()


class _NamedLogger:
    """A logger, what it wants to be told, and its thread."""

    def __init__(
        self, name: str, stat_logger: Any, engine: EngineReadings, on_failure: Callable[[LoggerThread], None]
    ) -> None:
        self.thread = LoggerThread(name, on_failure)
        self._logger = V0Adapter(stat_logger, engine.vllm_config) if is_v0(stat_logger) else stat_logger
        record = getattr(self._logger, "record", None)
        unused = (StatLoggerBase.record, CounterLogger.record)
        self.wants_records = record is not None and getattr(record, "__func__", None) not in unused
        self._options = _accepted(record, {"mm_cache_stats": None, "engine_idx": 0})
        if isinstance(stat_logger, CounterLogger):
            stat_logger.attach(engine)

    @property
    def is_behind(self) -> bool:
        """The logger has not taken in all records."""
        return self.wants_records and self.thread.has_calls

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        """Begin to call `record`."""
        record = functools.partial(self._logger.record, **self._options)
        self.thread.call("record", record, scheduler_stats, iteration_stats)

    def call(self, name: str, *args: Any) -> "Future[None]":
        """Begin to call a method, if the logger has it."""
        method = getattr(self._logger, name, None)
        if method is None or getattr(method, "__func__", None) is getattr(StatLoggerBase, name):
            done: Future[None] = Future()
            done.set_result(None)
            return done
        return self.thread.call(name, method, *args)

    def detach(self) -> None:
        """End the logger's use of the engine's counters."""
        if isinstance(self._logger, CounterLogger):
            self._logger.detach()

    def close(self) -> None:
        """Make the calls that wait, and no others."""
        self.thread.close()
        self.detach()


def requested_loggers(stat_loggers: StatLoggerArgument) -> dict[str, Callable[[VllmConfig], Any]]:
    """Return what makes each logger that the argument `stat_loggers` names, by the name of the logger.

    Raises TypeError if the argument is neither a list of factories nor a dict of loggers.
    """
    makers: dict[str, Callable[[VllmConfig], Any]] = {}
    if isinstance(stat_loggers, Mapping):
        for name, stat_logger in stat_loggers.items():
            _check_logger(name, stat_logger)
            makers[name] = functools.partial(_given, stat_logger)
    elif stat_loggers is not None:
        if not isinstance(stat_loggers, (list, tuple)) or not all(map(callable, stat_loggers)):
            raise TypeError(
                "stat_loggers must be a list of factories, each called with (vllm_config, engine_index), or a dict of "
                f"loggers by name, got {stat_loggers!r}"
            )
        for factory in stat_loggers:
            makers[_unused_name(factory, makers)] = functools.partial(_made, factory)
    return makers


def _given(stat_logger: Any, vllm_config: VllmConfig) -> Any:
    return stat_logger


def _made(factory: StatLoggerFactory, vllm_config: VllmConfig) -> Any:
    """Return the logger that `factory` makes."""
    is_aggregate = isinstance(factory, type) and issubclass(factory, AggregateStatLoggerBase)
    make: Callable[..., Any] = factory
    return make(vllm_config, [0] if is_aggregate else 0)


def _unused_name(factory: Any, used: Mapping[str, Any]) -> str:
    """Return a name for the logger that `factory` makes: that of a class or function, with a number if it is used."""
    function = getattr(factory, "func", factory)  # of a functools.partial
    name: str = getattr(function, "default_name", getattr(function, "__name__", type(function).__name__))
    candidates = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(candidate for candidate in candidates if candidate not in used)


def _check_logger(name: Any, stat_logger: Any) -> None:
    """Raise TypeError if `name` is not a name, or `stat_logger` is not a logger."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a stat logger must be a str, got {name!r}")
    if isinstance(stat_logger, type):
        raise TypeError(f"stat logger {name!r} must be a logger, got the class {stat_logger!r}; make an instance of it")
    if isinstance(stat_logger, logging.Logger):
        raise TypeError(
            f"stat logger {name!r} must be an object that is told of tokens, got Python's {stat_logger!r}; derive from "
            "StatLoggerBase, and write to it in `log`"
        )
    if not any(callable(getattr(stat_logger, method, None)) for method in ("record", "log")):
        raise TypeError(f"stat logger {name!r} must have a method `record` or `log`, got {stat_logger!r}")


def _accepted(function: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the `options` that `function` takes as keywords; older loggers lack some."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return options
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return options
    return {name: value for name, value in options.items() if name in parameters}
