"""How the stat loggers of an engine are called, without a core."""

import asyncio
import functools
import logging
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_mp import wire
from vllm_mp.client.outputs.completion import Completion
from vllm_mp.client.outputs.live_requests import LiveRequests
from vllm_mp.client.outputs.output_processor import OutputProcessor
from vllm_mp.client.outputs.stream import GenerationStream
from vllm_mp.client.prompts.request import GenerationRequest
from vllm_mp.client.stat_loggers import (
    AggregateStatLoggerBase,
    LoggingStatLogger,
    StatLoggerBase,
    StatLoggers,
    logger_thread,
    requested_loggers,
    stat_loggers,
)
from vllm_mp.client.stats import CoreReading, EngineStats
from vllm_mp.requests.sampling_params import SamplingParams

CONFIG = SimpleNamespace(cache_config="the cache's configuration", lora_config=None)
WAIT_S = 30.0


class Engine:
    """The readings of an engine with one live request, to whose core a test adds tokens."""

    def __init__(self) -> None:
        self.vllm_config = CONFIG
        self.stats = EngineStats(max_model_len=100)
        self.load: CoreReading | None = CoreReading(1, 3, 2, 75, 100, 4, 0, False, False)
        self.num_live_requests = 1
        self._requests = OutputProcessor(LiveRequests(self.stats.note_end))
        params = SamplingParams(max_tokens=1000)
        request = GenerationRequest("a", None, [1, 2, 3], wire.pack_ids([1, 2, 3]), params, arrival_time=0.0)
        stream = GenerationStream(request, [Completion(0, params)])
        self._requests.requests.reserve("a")
        self._requests.enter(stream)
        self.stats.note_sent(stream, 0.0, {}, "poet")
        self._num_tokens = 0

    def core_load(self) -> CoreReading | None:
        return self.load

    def begin_to_ask_core(self) -> None:
        pass

    def step(self) -> None:
        """Receive a token."""
        columns = wire.pack_tokens(np.array([0]), np.array([7]), np.array([self._num_tokens]))
        queued = [] if self._num_tokens else [(0, 0.0)]
        self._num_tokens += 1
        self.stats.note_step(wire.StepOutput(1, 1, *columns, queued=queued))


class Logger(StatLoggerBase):
    """Keeps what it is told, by the name of the method."""

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        self.config = vllm_config
        self.calls: list[str] = []
        self.records: list[tuple[Any, Any]] = []
        self.num_tokens = 0
        self.told = threading.Condition()

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        self.note("record", iteration_stats.num_generation_tokens)
        self.records.append((scheduler_stats, iteration_stats))

    def log(self) -> None:
        self.note("log")

    def log_engine_initialized(self) -> None:
        self.note("log_engine_initialized")

    def note(self, name: str, num_tokens: int = 0) -> None:
        with self.told:
            self.calls.append(name)
            self.num_tokens += num_tokens
            self.told.notify_all()

    def wait_for_tokens(self, num_tokens: int) -> None:
        with self.told:
            assert self.told.wait_for(lambda: self.num_tokens >= num_tokens, WAIT_S), self.calls


class Failing(Logger):
    def record(self, *args: Any, **options: Any) -> None:
        raise ZeroDivisionError("the logger's own")


class Blocking(Logger):
    """Blocks in its first record until it is told to go on."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.goes_on = threading.Event()

    def record(self, *args: Any, **options: Any) -> None:
        super().record(*args, **options)
        assert self.goes_on.wait(WAIT_S)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def loggers(engine):
    loggers = StatLoggers(engine)
    yield loggers
    loggers.close()


def log(loggers: StatLoggers) -> None:
    asyncio.run(asyncio.wait_for(loggers.log(), WAIT_S))


def test_a_logger_is_told_what_happens_and_the_load_of_the_core(engine, loggers):
    logger = Logger()
    loggers.add("mine", logger)
    engine.step()
    engine.step()
    logger.wait_for_tokens(2)
    log(loggers)
    assert logger.calls[0] == "log_engine_initialized"
    assert logger.calls[-1] == "log"
    (scheduler, iteration) = logger.records[0]
    assert (scheduler.num_running_reqs, scheduler.num_waiting_reqs, scheduler.kv_cache_usage) == (3, 2, 0.25)
    assert scheduler.prefix_cache_stats.queries == iteration.num_prompt_tokens == 3
    assert iteration.num_preempted_reqs == 4


def test_the_log_call_comes_after_the_record_of_all_that_has_happened(engine, loggers):
    logger = Logger()
    loggers.add("mine", logger)
    for num_tokens in range(1, 6):
        engine.step()
        log(loggers)
        assert logger.num_tokens == num_tokens
        assert logger.calls[-1] == "log"


@pytest.mark.parametrize(("lora_config", "running"), [(None, {}), (SimpleNamespace(max_loras=2), {"poet": 1})])
def test_a_logger_is_told_the_adapters_of_live_requests_if_lora_is_enabled(lora_config, running, engine, loggers):
    engine.vllm_config = SimpleNamespace(cache_config=None, lora_config=lora_config)
    logger = Logger()
    loggers.add("mine", logger)
    engine.step()
    log(loggers)
    scheduler, _ = logger.records[0]
    assert (scheduler.waiting_lora_adapters, scheduler.running_lora_adapters) == ({}, running)


def test_the_load_of_a_core_that_was_never_known_is_none(engine, loggers):
    logger, engine.load = Logger(), None
    loggers.add("mine", logger)
    engine.step()
    log(loggers)
    assert logger.records[0][0] is None


def test_preemptions_are_counted_since_the_record_before_and_from_zero_for_the_next_core(engine, loggers):
    logger = Logger()
    loggers.add("mine", logger)
    for incarnation, num_preemptions in ((1, 4), (1, 6), (2, 1)):
        engine.load = engine.load._replace(incarnation=incarnation, num_preemptions=num_preemptions)
        engine.step()
        log(loggers)
    assert [iteration.num_preempted_reqs for _, iteration in logger.records] == [4, 2, 1]


def test_a_logger_that_raises_is_reported_once_by_name_and_dropped(engine, loggers, caplog):
    healthy = Logger()
    loggers.add("broken", Failing())
    loggers.add("healthy", healthy)
    for _ in range(3):
        engine.step()
        log(loggers)
    assert caplog.text.count("stat logger 'broken' failed in record, and is not called again") == 1
    assert "the logger's own" in caplog.text
    assert healthy.num_tokens == 3
    loggers.add("broken", Logger())  # the name is free


@pytest.mark.parametrize("error", [ValueError("the logger's own"), SystemExit(1)])
def test_a_logger_that_raises_in_log_is_dropped(error, engine, loggers, caplog):
    class FailsToLog(Logger):
        def log(self) -> None:
            self.note("log")
            self.thread = threading.current_thread()
            raise error

    logger = FailsToLog()
    loggers.add("broken", logger)
    log(loggers)
    log(loggers)
    assert logger.calls.count("log") == 1
    assert "stat logger 'broken' failed in log" in caplog.text
    logger.thread.join(WAIT_S)
    assert not logger.thread.is_alive()


def test_a_logger_that_blocks_is_dropped_after_the_limit_with_the_reason(engine, loggers, caplog, monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(logger_thread, "time", SimpleNamespace(monotonic=lambda: clock.now))
    blocking, healthy = Blocking(), Logger()
    loggers.add("blocking", blocking)
    loggers.add("healthy", healthy)
    engine.step()
    blocking.wait_for_tokens(1)
    while loggers._loggers["healthy"].thread.has_calls or not healthy.num_tokens:
        time.sleep(0.001)
    clock.now += stat_loggers.CALL_LIMIT_S + 1
    engine.step()
    healthy.wait_for_tokens(2)  # records go on when the blocking logger is dropped
    assert "stat logger 'blocking' has blocked for 6.0 s in record, and is not called again" in caplog.text
    assert "the limit is 5 s" in caplog.text
    assert blocking.calls == ["log_engine_initialized", "record"]
    blocking.goes_on.set()


def test_do_log_stats_returns_although_a_logger_blocks(engine, loggers, monkeypatch):
    monkeypatch.setattr(stat_loggers, "CALL_LIMIT_S", 0.2)
    blocking = Blocking()
    loggers.add("blocking", blocking)
    engine.step()
    log(loggers)
    assert "log" not in blocking.calls
    blocking.goes_on.set()


def test_a_logger_that_only_logs_and_blocks_is_dropped_at_a_later_log(loggers, caplog, monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(logger_thread, "time", SimpleNamespace(monotonic=lambda: clock.now))
    begun, goes_on = threading.Event(), threading.Event()

    class BlocksInLog(StatLoggerBase):
        def log(self) -> None:
            begun.set()
            goes_on.wait(WAIT_S)

    loggers.add("blocking", BlocksInLog(None))
    loggers._begin_log()
    assert begun.wait(WAIT_S)
    clock.now += stat_loggers.CALL_LIMIT_S + 1
    loggers._begin_log()
    assert "stat logger 'blocking' has blocked for 6.0 s in log, and is not called again" in caplog.text
    assert not loggers._loggers
    goes_on.set()


def test_names_of_loggers_are_unique(loggers):
    loggers.add("mine", Logger())
    with pytest.raises(KeyError, match="a logger named 'mine' exists; remove it first"):
        loggers.add("mine", Logger())
    loggers.remove("mine")
    loggers.add("mine", Logger())
    with pytest.raises(KeyError, match="there is no logger named 'other'; there are: mine"):
        loggers.remove("other")


@pytest.mark.parametrize(
    ("name", "logger", "message"),
    [
        (1, Logger(), "the name of a stat logger must be a str, got 1"),
        ("mine", Logger, "make an instance"),
        ("mine", logging.getLogger("x"), "got Python's <Logger x.*derive from StatLoggerBase"),
        ("mine", "a string", "must have a method `record` or `log`, got 'a string'"),
    ],
)
def test_what_is_no_logger_is_refused(name, logger, message, loggers):
    with pytest.raises(TypeError, match=message):
        loggers.add(name, logger)


def test_records_end_with_the_last_logger_that_wants_them(engine, loggers):
    loggers.add("mine", Logger())
    loggers.add("counters", LoggingStatLogger(CONFIG))
    loggers.remove("mine")
    engine.step()
    assert engine.stats.take_record() is None


def test_no_thread_of_a_logger_outlives_it(engine):
    loggers = StatLoggers(engine)
    before = set(threading.enumerate())
    for name in ("removed", "closed"):
        loggers.add(name, Logger())
    engine.step()
    log(loggers)
    threads = set(threading.enumerate()) - before
    assert {thread.name for thread in threads} == {"stat-logger-removed", "stat-logger-closed", "stat-records"}
    loggers.remove("removed")
    loggers.close()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_the_end_of_the_engine_hands_out_the_last_record(engine):
    loggers, logger = StatLoggers(engine), Logger()
    loggers.add("mine", logger)
    engine.step()
    loggers.close()
    assert logger.num_tokens == 1
    with pytest.raises(RuntimeError, match="the engine was shut down"):
        loggers.add("late", Logger())


def test_loggers_with_older_signatures_are_called_with_what_they_take(engine, loggers):
    told = []

    class Older:
        def record(self, scheduler_stats, iteration_stats, engine_idx=1):
            told.append((iteration_stats.num_generation_tokens, engine_idx))

    class Oldest:
        def record(self, scheduler_stats, iteration_stats):
            told.append(iteration_stats.num_generation_tokens)

    loggers.add("older", Older())
    loggers.add("oldest", Oldest())
    engine.step()
    log(loggers)
    loggers.close()
    assert sorted(map(str, told)) == ["(1, 0)", "1"]


def test_loggers_of_v0_get_its_statistics(engine):
    told = []

    class OfV0:
        def log(self, stats):
            told.append(stats)

        def info(self, type, obj):
            told.append((type, obj))

    loggers = StatLoggers(engine)
    loggers.add("prometheus", OfV0())
    engine.step()
    loggers.close()
    assert told[0] == ("cache_config", CONFIG.cache_config)
    (stats,) = told[1:]
    assert (stats.num_running_sys, stats.num_waiting_sys, stats.gpu_cache_usage_sys) == (3, 2, 0.25)
    assert (stats.num_prompt_tokens_iter, stats.num_generation_tokens_iter, stats.num_tokens_iter) == (3, 1, 4)
    assert len(stats.time_to_first_tokens_iter) == 1
    assert stats.gpu_prefix_cache_hit_rate == 0.0


def test_factories_are_called_with_the_configuration_and_named_by_their_class(engine, loggers):
    class Aggregate(AggregateStatLoggerBase):
        pass

    made = requested_loggers([Logger, Logger, functools.partial(Logger), Aggregate, LoggingStatLogger])
    assert list(made) == ["Logger", "Logger-2", "Logger-3", "Aggregate", "logging"]
    assert made["Logger"](CONFIG).config is CONFIG
    assert made["Aggregate"](CONFIG).engine_indexes == [0]
    mine = Logger()
    assert requested_loggers({"mine": mine})["mine"](CONFIG) is mine
    assert requested_loggers(None) == requested_loggers([]) == {}


@pytest.mark.parametrize("wrong", [Logger(), [Logger()], "logging", {"mine": Logger}, {"mine": 1}, {1: Logger()}])
def test_stat_loggers_of_another_kind_are_refused(wrong):
    with pytest.raises(TypeError, match=r"stat.logger"):
        requested_loggers(wrong)


def test_a_logger_that_cannot_be_made_is_reported_and_left_out(engine, loggers, caplog):
    def fail(vllm_config, engine_index):
        raise OSError("no such collector")

    loggers.add_all(requested_loggers([fail, Logger]))
    assert "stat logger 'fail' failed when it was made, and is left out" in caplog.text
    assert "no such collector" in caplog.text
    loggers.remove("Logger")


def test_a_logger_replaces_the_one_of_its_name(loggers):
    loggers.add_all({"logging": LoggingStatLogger})
    loggers.add_all(requested_loggers({"logging": Logger()}))
    loggers.remove("logging")
    with pytest.raises(KeyError, match="there are: none"):
        loggers.remove("logging")


def test_the_log_line_says_throughput_and_load_since_the_line_before(engine, loggers, caplog):
    loggers.add("logging", LoggingStatLogger(CONFIG))
    engine.step()
    with caplog.at_level(logging.INFO):
        log(loggers)
        log(loggers)
    first, second = (record.message for record in caplog.records)
    assert "1 live requests" in first
    assert "KV cache 25.0% in use, prefix cache hits 0.0%" in first
    assert "0.0 prompt tokens/s, 0.0 tokens/s generated" in second
    assert " 0.0 prompt tokens/s" not in first
