"""Stat loggers of engines: what they are told, where Prometheus finds the metrics, and that they disturb no stream."""

import asyncio
import gc
import logging
import threading
import urllib.request

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from vllm_mp import AsyncEngineArgs, AsyncLLM, LoggingStatLogger, PrometheusStatLogger, SamplingParams, StatLoggerBase
from vllm_mp.client.engine import start
from vllm_mp.client.stat_loggers import prometheus
from vllm_mp.client.stat_loggers import readings as engine_readings
from vllm_mp.server.app import build_app
from vllm_mp.server.http.options import ServerOptions
from vllm_mp.testing.engines import ENGINE, answer, replay_core

pytestmark = pytest.mark.usefixtures("forked_cores")

PROMPT = {"prompt_token_ids": [1, 2, 3, 4, 5]}
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


class Totals(StatLoggerBase):
    """Adds up what it is told."""

    def __init__(self, vllm_config=None, engine_index=0):
        self.num_prompt_tokens = self.num_generation_tokens = 0
        self.finished, self.sleeps, self.scheduler_stats, self.num_logs = [], [], None, 0

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
        self.scheduler_stats = scheduler_stats
        self.num_prompt_tokens += iteration_stats.num_prompt_tokens
        self.num_generation_tokens += iteration_stats.num_generation_tokens
        self.finished += iteration_stats.finished_requests

    def log(self):
        self.num_logs += 1

    def record_sleep_state(self, is_awake, level):
        self.sleeps.append((is_awake, level))


class Blocking(Totals):
    """Blocks in its first record until it is told to go on."""

    def __init__(self):
        super().__init__()
        self.blocks, self.goes_on = threading.Event(), threading.Event()

    def record(self, *args, **options):
        self.blocks.set()
        assert self.goes_on.wait(60)


@pytest.fixture(scope="module")
def address(default_model, tmp_path_factory):
    with replay_core(tmp_path_factory.mktemp("replay")) as address:
        yield address


@pytest.fixture
def connect(address):
    """A function that returns an engine, which is shut down after the test."""
    engines = []

    def connect():
        engines.append(AsyncLLM.connect(address))
        return engines[-1]

    yield connect
    for engine in engines:
        engine.shutdown()


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Return the metrics of engines in a scrape, but not those that describe the core's load at the moment."""
    return {
        (sample.name, *map(str, sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if family.type != "gauge" and not sample.name.startswith(("vllm_mp:http", "vllm_mp:event", "vllm_mp:rejected"))
    }


def test_a_logger_is_told_all_tokens_and_ends(connect):
    async def run(engine, logger):
        engine.add_logger("mine", logger)
        await asyncio.gather(*(answer(engine, PROMPT, PARAMS, str(number)) for number in range(3)))
        await engine.do_log_stats()

    logger = Totals()
    asyncio.run(run(connect(), logger))
    assert (logger.num_prompt_tokens, logger.num_generation_tokens, logger.num_logs) == (15, 12, 1)
    assert sorted(finished.request_id for finished in logger.finished) == ["0", "1", "2"]
    assert {str(finished.finish_reason) for finished in logger.finished} == {"length"}
    assert logger.scheduler_stats.num_running_reqs >= 0


def test_a_logger_that_blocks_disturbs_no_stream(connect):
    async def run(engine, logger):
        engine.add_logger("blocking", logger)
        for _ in range(3):
            await asyncio.wait_for(answer(engine, PROMPT, PARAMS), 30)
            assert await asyncio.to_thread(logger.blocks.wait, 30)
        assert not logger.goes_on.is_set()

    logger = Blocking()
    asyncio.run(run(connect(), logger))
    logger.goes_on.set()


def test_a_logger_that_raises_disturbs_no_stream(connect, caplog):
    class Failing(Totals):
        def record(self, *args, **options):
            raise ZeroDivisionError("the logger's own")

    async def run(engine):
        engine.add_logger("broken", Failing())
        for _ in range(3):
            await answer(engine, PROMPT, PARAMS)
            await engine.do_log_stats()

    asyncio.run(run(connect()))
    assert caplog.text.count("stat logger 'broken' failed in record") == 1


def test_an_engine_with_loggers_is_garbage_collected_and_ends_their_threads(address):
    async def run(engine):
        engine.add_logger("mine", Totals())
        engine.add_logger("prometheus", PrometheusStatLogger(engine.vllm_config, registry=registry))
        await answer(engine, PROMPT, PARAMS)
        await engine.do_log_stats()

    before, registry = set(threading.enumerate()), CollectorRegistry()
    engine = AsyncLLM.connect(address)
    asyncio.run(run(engine))
    threads = {thread for thread in set(threading.enumerate()) - before if thread.name.startswith("stat-")}
    assert len(threads) == 3
    del engine
    gc.collect()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert generate_latest(registry) == b""


def test_do_log_stats_writes_a_line_until_the_logger_is_removed(connect, caplog):
    async def run(engine):
        await answer(engine, PROMPT, PARAMS)
        await engine.do_log_stats()
        engine.remove_logger("logging")
        await engine.add_logger("mine", Totals())  # works with and without `await`
        await engine.remove_logger("mine")
        await engine.do_log_stats(scheduler_outputs=None, model_output=None)

    with caplog.at_level(logging.INFO, "vllm_mp.client.stat_loggers"):
        asyncio.run(run(connect()))
    assert caplog.text.count("tokens/s generated") == 1


def test_a_registry_of_an_app_has_the_metrics_of_the_server(connect):
    registry, engine = CollectorRegistry(), connect()

    async def run():
        engine.add_logger("prometheus", PrometheusStatLogger(engine.vllm_config, registry=registry))
        await answer(engine, PROMPT, PARAMS)
        app = build_app(engine, ServerOptions())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            of_server = (await client.get("/metrics")).text
        return of_server, generate_latest(registry).decode()

    of_server, of_app = asyncio.run(run())
    assert samples(of_app) == samples(of_server)
    assert (
        samples(of_app)["vllm:generation_tokens_total", *map(str, [("engine", "0"), ("model_name", model(engine))])]
        == 4
    )


def test_a_scrape_in_another_thread_has_the_load_that_only_the_core_knows(connect, monkeypatch):
    monkeypatch.setattr(prometheus, "_LOAD_TIMEOUT_S", 30.0)
    monkeypatch.setattr(engine_readings, "_TIMEOUT_S", 30.0)
    registry, engine = CollectorRegistry(), connect()
    server, thread = start_http_server(0, "127.0.0.1", registry)

    def scrape() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=30) as response:
            return response.read().decode()

    async def run() -> str:
        engine.add_logger("prometheus", PrometheusStatLogger(engine.vllm_config, registry=registry))
        await engine.pause_generation("keep")
        try:
            return await asyncio.to_thread(scrape)
        finally:
            await engine.resume_generation()

    try:
        families = {family.name: family for family in text_string_to_metric_families(asyncio.run(run()))}
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert families["vllm_mp:core_paused"].samples[0].value == 1


def test_engines_of_one_process_share_a_registry_under_different_labels(connect):
    registry = CollectorRegistry()
    engines = [connect() for _ in range(2)]

    async def run():
        for number, engine in enumerate(engines):
            engine.add_logger("prometheus", PrometheusStatLogger(engine.vllm_config, [0], registry))
            for _ in range(number + 1):
                await answer(engine, PROMPT, PARAMS)

    asyncio.run(run())
    assert tokens_by_engine(registry) == {"0": 4, "1": 8}
    engines[0].remove_logger("prometheus")
    assert tokens_by_engine(registry) == {"1": 8}
    engines[1].shutdown()
    assert generate_latest(registry) == b""
    Gauge("vllm:num_requests_running", "of another program", registry=registry)  # the names are free again


def test_metrics_of_others_are_not_mixed_with_those_of_an_engine(connect):
    registry, engine = CollectorRegistry(), connect()
    Gauge("vllm:num_requests_running", "of another program", registry=registry)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        engine.add_logger("prometheus", PrometheusStatLogger(engine.vllm_config, registry=registry))


def test_a_prometheus_logger_shows_one_engine(connect):
    first, second = connect(), connect()
    logger = PrometheusStatLogger(first.vllm_config, registry=CollectorRegistry())
    first.add_logger("prometheus", logger)
    with pytest.raises(ValueError, match="belongs to another engine"):
        second.add_logger("prometheus", logger)


@pytest.fixture(scope="module")
def quiet_engine(small_model):
    """A real engine that writes no statistics, and the logger that it was given."""
    totals = Totals()
    args = AsyncEngineArgs(model=str(small_model), **{**ENGINE, "disable_log_stats": True})
    engine = AsyncLLM.from_engine_args(args, stat_loggers=[lambda config, index: totals])
    yield engine, totals
    engine.shutdown()


def test_disable_log_stats_leaves_out_the_line_and_no_logger_that_is_given(quiet_engine, caplog):
    engine, totals = quiet_engine

    async def run():
        await answer(engine, PROMPT, PARAMS)
        await engine.do_log_stats()

    with caplog.at_level(logging.INFO, "vllm_mp.client.stat_loggers"):
        asyncio.run(run())
    assert (totals.num_generation_tokens, totals.num_logs) == (4, 1)
    assert totals.scheduler_stats.num_running_reqs in (0, 1)
    assert "tokens/s generated" not in caplog.text


def test_a_logger_is_told_of_sleep_and_of_its_end(quiet_engine):
    engine, totals = quiet_engine

    async def run():
        await engine.sleep(2, mode="keep")
        await engine.wake_up(["weights"])
        await engine.wake_up(["kv_cache"])
        await engine.do_log_stats()

    asyncio.run(run())
    assert totals.sleeps == [(1, 2), (0, 0)]


@pytest.mark.parametrize(
    ("way", "kind"), [("from_engine_args", "list"), ("from_vllm_config", "dict"), ("start", "list")]
)
def test_every_way_to_start_an_engine_takes_loggers(way, kind, address, monkeypatch):
    engines = []

    class Recorder(AsyncLLM):
        def __init__(self, engine):
            engines.append(engine)

    Recorder.connect(address)
    monkeypatch.setattr(start, "launch_cores", lambda *arguments: engines[0])
    totals = Totals()
    given = {"mine": totals} if kind == "dict" else [lambda config, index: totals, LoggingStatLogger]
    args = AsyncEngineArgs(skip_tokenizer_init=True)

    async def run():
        if way == "start":
            engine = await AsyncLLM.start(args, stat_loggers=given)
        else:
            engine = getattr(AsyncLLM, way)(
                args.create_engine_config() if way == "from_vllm_config" else args, stat_loggers=given
            )
        await answer(engine, PROMPT, PARAMS)
        await engine.do_log_stats()
        engine.remove_logger("logging")
        await engine.aclose()

    asyncio.run(run())
    assert (totals.num_generation_tokens, totals.num_logs) == (4, 1)


def test_stat_loggers_of_another_kind_are_refused_before_a_core_is_started(monkeypatch):
    monkeypatch.setattr(start, "launch_cores", None)
    args = AsyncEngineArgs(skip_tokenizer_init=True)
    with pytest.raises(TypeError, match="stat_loggers must be a list of factories"):
        AsyncLLM.from_engine_args(args, stat_loggers=[Totals()])
    with pytest.raises(TypeError, match="must have a method `record` or `log`"):
        asyncio.run(AsyncLLM.start(args, stat_loggers={"mine": 1}))


def model(engine: AsyncLLM) -> str:
    return engine.model_config.served_model_name


def tokens_by_engine(registry: CollectorRegistry) -> dict[str, float]:
    return {
        sample.labels["engine"]: sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if sample.name == "vllm:generation_tokens_total"
    }
