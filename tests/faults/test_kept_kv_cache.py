"""The KV cache outlives the core: after a death from outside, nothing is read again; after a crash, everything is."""

import asyncio
import os
import signal

import pytest
from support import stand_in_cuda
from support.engine_fixtures import SLOW_STEPS
from support.recovering_requests import REQUESTS, answers, answers_through

from vllm_mp import AsyncEngineArgs, AsyncLLM
from vllm_mp.testing.engines import ENGINE, eventually, running_engine, standalone_core

pytestmark = pytest.mark.usefixtures("forked_cores")

OPTIONS = {"fault_injection": SLOW_STEPS, "max_core_restarts": 100, "max_num_batched_tokens": 64}


def send(number):
    """Return a function that sends the core a signal."""
    return lambda engine: os.kill(engine.cores.first.supervisor.core.process.pid, number)


@pytest.fixture(scope="module")
def engine(small_model):
    with running_engine(small_model, engine_iteration_timeout_s=4.0, **OPTIONS) as engine:
        yield engine


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGKILL, marks=pytest.mark.essential), signal.SIGSTOP], ids=["killed", "hangs"]
)
def test_requests_of_all_kinds_continue_and_nothing_is_computed_again(engine, number):
    async def run():
        expected = await answers(engine)
        found, status = await answers_through(engine, send(number))
        assert found == expected
        assert status["num_found_blocks"] > 20
        assert status["num_recomputed_tokens"] == 0
        assert status["free_blocks"] == status["total_blocks"]

    asyncio.run(run())


@pytest.mark.parametrize(("mode", "finds"), [("auto", False), ("always", True), ("never", False)])
def test_option_says_whether_the_cache_of_a_crashed_core_is_used(small_model, mode, finds):
    options = {**ENGINE, "fault_injection": f"abort@step=12;{SLOW_STEPS}", "recover_kv_cache": mode}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(str(small_model), **options))

    async def run():
        found = await answers(engine, REQUESTS[:2])
        status = await engine.core_status()
        assert status["incarnation"] > 1
        assert (status["num_found_blocks"] > 0) == finds
        assert (status["num_recomputed_tokens"] == 0) == finds
        return found

    try:
        found = asyncio.run(run())
    finally:
        engine.shutdown()
    assert [len(tokens) for completions in found for tokens, _ in completions] == [40] * 3


@pytest.mark.parametrize(
    "options",
    [{"async_scheduling": True}, pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow)],
    ids=lambda options: " ".join(options),
)
def test_cache_in_memory_of_a_device_outlives_killed_cores(small_model, tmp_path, monkeypatch, options):
    stand_in_cuda.give_to_cores(tmp_path, monkeypatch)
    with running_engine(small_model, **{**OPTIONS, **options}) as engine:

        async def run():
            expected = await answers(engine)

            async def die_and_recover():
                pids = stand_in_cuda.pids_with_memory()
                assert len(pids) == options.get("tensor_parallel_size", 1)
                found, status = await answers_through(engine, send(signal.SIGKILL))
                assert found == expected
                assert status["num_found_blocks"] > 10
                assert status["num_recomputed_tokens"] == 0
                assert not pids & stand_in_cuda.pids_with_memory()

            await die_and_recover()
            await engine.sleep()
            assert not stand_in_cuda.pids_with_memory()
            await engine.wake_up()
            await die_and_recover()

        asyncio.run(run())


@pytest.mark.slow
def test_streams_go_on_where_the_driver_makes_no_memory(small_model, tmp_path, monkeypatch):
    stand_in_cuda.give_to_cores(tmp_path, monkeypatch)
    monkeypatch.setenv(stand_in_cuda.FAILS, "cuMemCreate")
    with running_engine(small_model, **OPTIONS) as engine:

        async def run():
            expected = await answers(engine)
            found, status = await answers_through(engine, send(signal.SIGKILL))
            assert found == expected
            assert status["num_found_blocks"] == 0
            assert status["restarts"] == 1
            assert not stand_in_cuda.pids_with_memory()

        asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": False},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"async_scheduling": True},
        {"dtype": "bfloat16", "quantization": "int8"},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "int8"},
    ],
    ids=lambda options: " ".join(options),
)
def test_nothing_is_computed_again_with(small_model, options):
    with running_engine(small_model, **{**OPTIONS, **options}) as engine:

        async def run():
            expected = await answers(engine)
            found, status = await answers_through(engine, send(signal.SIGKILL))
            assert found == expected
            assert status["num_found_blocks"] > 20
            assert status["num_recomputed_tokens"] == 0

        asyncio.run(run())


@pytest.mark.slow
def test_cache_survives_in_a_core_that_several_clients_share(small_model, tmp_path):
    address = f"ipc://{tmp_path}/core.sock"
    with standalone_core(small_model, address, "--fault-injection", SLOW_STEPS):
        first, second = (AsyncLLM.connect(address) for _ in range(2))

        async def run():
            expected = await answers(first)
            pid = (await first.core_status())["pid"]
            running = [asyncio.create_task(answers(client)) for client in (first, second)]
            step = (await first.core_status())["step"]

            async def has_run():
                return (await second.core_status())["step"] > step + 25

            await eventually(has_run)
            os.kill(pid, signal.SIGKILL)
            assert await asyncio.gather(*running) == [expected] * 2
            assert (await first.core_status())["num_recomputed_tokens"] == 0

        try:
            asyncio.run(run())
        finally:
            first.shutdown()
            second.shutdown()


def test_without_memory_to_share_the_cache_ends_with_each_core_and_streams_go_on(small_model, tmp_path):
    address = f"ipc://{tmp_path}/core.sock"
    small_files = "ulimit -f 20000"  # less than the KV cache, more than a status page
    with standalone_core(small_model, address, "--fault-injection", SLOW_STEPS, before=small_files) as parent:
        client = AsyncLLM.connect(address, timeout=120)  # a core that is not forked imports torch first

        async def run():
            expected = await answers(client)
            pid = (await client.core_status())["pid"]
            found, status = await answers_through(client, lambda _: os.kill(pid, signal.SIGKILL))
            assert found == expected
            assert status["num_found_blocks"] == 0
            assert status["restarts"] == 1

        try:
            asyncio.run(run())
        finally:
            client.shutdown()
    assert parent.returncode == 0


def test_prefixes_that_were_reset_are_not_found_after_a_death(engine):
    async def run():
        await answers(engine, REQUESTS[:1])
        await engine.reset_prefix_cache()
        pid = (await engine.core_status())["pid"]
        os.kill(pid, signal.SIGKILL)

        async def is_replaced():
            # A call would have to be answered within `engine_iteration_timeout_s`, which a start may exceed.
            return engine.last_core_status().get("pid", pid) != pid and engine.cores.first.has_core

        await eventually(is_replaced)
        assert (await engine.core_status())["num_found_blocks"] == 0

    asyncio.run(run())
