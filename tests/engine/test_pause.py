"""A paused engine generates nothing, loses no request, uses no processor and still answers calls."""

import asyncio
import re
import signal

import psutil
import pytest
from support.covering import covering
from support.engine_fixtures import SHORT_STEPS, SLOW_STEPS

from vllm_mp import AsyncLLM, EngineDeadError, EngineError, SamplingParams, wire
from vllm_mp.testing.engines import (
    answer,
    eventually,
    greedy,
    is_empty,
    num_waiting_is,
    rest,
    running_engine,
    standalone_core,
)

pytestmark = pytest.mark.usefixtures("forked_programs")

PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def overlapping(small_model):
    with running_engine(small_model, async_scheduling=True, fault_injection=SHORT_STEPS) as engine:
        yield engine


@pytest.fixture
def engine(request):
    engine = request.getfixturevalue(getattr(request, "param", "llm"))
    yield engine
    asyncio.run(engine.resume_generation())
    asyncio.run(eventually(lambda: is_empty(engine)))


def streaming(llm, max_tokens=400, request_id=None):
    return llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True), request_id)


with_and_without_overlap = pytest.mark.parametrize("engine", ["llm", "overlapping"], indirect=True)


@with_and_without_overlap
def test_mode_abort_ends_running_requests_and_later_requests_wait_for_resume(engine):
    async def run():
        stream = streaming(engine)
        await anext(stream)
        await engine.pause_generation()
        assert await engine.is_paused()
        assert (await rest(stream)).finish_reason == "abort"
        later = asyncio.create_task(answer(engine, PROMPT, greedy(5)))
        await eventually(num_waiting_is(engine, 1))
        await engine.check_health()
        await engine.resume_generation()
        assert not await engine.is_paused()
        assert len((await later).outputs[0].token_ids) == 5

    asyncio.run(run())


@with_and_without_overlap
def test_mode_wait_returns_when_running_requests_have_ended(engine):
    async def run():
        stream = streaming(engine, 60)
        await anext(stream)
        await engine.pause_generation("wait")
        status = await engine.core_status()
        assert (status["num_running"], status["is_paused"]) == (0, True)
        assert len((await rest(stream)).token_ids) == 60

    asyncio.run(run())


@pytest.mark.essential
@pytest.mark.parametrize(
    ("engine", "clear_cache"),
    covering(["llm", "overlapping"], [True, False], rest_is_extended=True),
    indirect=["engine"],
)
def test_mode_keep_freezes_a_stream_which_continues_unchanged_after_resume(engine, clear_cache):
    async def run():
        expected = (await rest(streaming(engine, 60))).token_ids
        stream = streaming(engine, 60)
        await anext(stream)
        await engine.pause_generation("keep", clear_cache)
        step = (await engine.core_status())["step"]
        held = asyncio.create_task(answer(engine, PROMPT, greedy(5)))
        await eventually(num_waiting_is(engine, 2 if clear_cache else 1))
        status = await engine.core_status()
        assert status["step"] == step
        assert (status["free_blocks"] == status["total_blocks"]) == clear_cache
        await engine.resume_generation()
        assert (await rest(stream)).token_ids == expected
        assert (await held).finished

    asyncio.run(run())


@with_and_without_overlap
def test_mode_keep_returns_after_the_consumers_got_the_last_tokens(engine):
    num_taken = 0

    async def consume(stream):
        nonlocal num_taken
        async for _ in stream:
            num_taken += 1

    async def has_taken(count):
        return num_taken >= count

    async def run():
        tasks = [asyncio.create_task(consume(streaming(engine, 400))) for _ in range(100)]
        for _ in range(12):
            count = num_taken + 100
            await eventually(lambda count=count: has_taken(count))
            await engine.pause_generation("keep", clear_cache=False)
            at_the_pause = num_taken
            for _ in range(3):
                await engine.core_status()
            assert num_taken == at_the_pause
            await engine.resume_generation()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())


def test_requests_can_be_aborted_during_a_pause(engine):
    async def run():
        stream = streaming(engine, request_id="frozen")
        await anext(stream)
        await engine.pause_generation("keep")
        held = await engine.add_request("held", PROMPT, greedy(5))
        await eventually(num_waiting_is(engine, 2))
        await engine.abort(["frozen", "held"])
        assert (await rest(stream)).finish_reason == "abort"
        assert (await rest(held)).finish_reason == "abort"
        await eventually(lambda: is_empty(engine))
        assert await engine.is_paused()

    asyncio.run(run())


def test_paused_engine_with_requests_uses_no_processor_time(engine):
    async def run():
        stream = streaming(engine)
        await anext(stream)
        await engine.pause_generation("keep")
        core = psutil.Process((await engine.core_status())["pid"])

        async def is_idle():
            before = core.cpu_times()
            await asyncio.sleep(1.5)
            after = core.cpu_times()
            return after.user + after.system - before.user - before.system <= 0.1

        await eventually(is_idle)
        await stream.aclose()

    asyncio.run(run())


def test_pause_outlives_its_cancelled_call_and_resume_ends_a_waiting_call(engine):
    async def run():
        stream = streaming(engine)
        await anext(stream)
        cancelled = asyncio.create_task(engine.pause_generation("wait"))
        overtaken = asyncio.create_task(engine.pause_generation("wait"))
        await eventually(engine.is_paused)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert await engine.is_paused()
        await engine.resume_generation()
        with pytest.raises(EngineError, match="resumed before"):
            await overtaken
        await stream.aclose()

    asyncio.run(run())


def test_invalid_argument_is_refused_by_name_and_pauses_nothing(engine):
    async def run():
        with pytest.raises(ValueError, match=r"mode must be one of abort, wait, keep, got 'stop'"):
            await engine.pause_generation("stop")
        with pytest.raises(TypeError, match="clear_cache must be true or false, got 'yes'"):
            await engine.pause_generation("keep", clear_cache="yes")
        assert not await engine.is_paused()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("pause", [], "missing a required argument: 'mode'"),
        ("pause", ["keep", True, 3], "too many positional arguments"),
        ("pause", ["stop", True], "got 'stop'"),
        ("pause", [["keep"], True], None),
        ("pause", [None, True], "got None"),
        ("pause", ["keep", "yes"], "clear_cache must be true or false, got 'yes'"),
        ("resume", ["now"], "too many positional arguments"),
        ("explode", [1], "no operation 'explode'"),
    ],
)
def test_core_answers_a_call_with_wrong_arguments_with_an_error(engine, name, args, words):
    async def run():
        engine.cores.attach()
        if words is None:
            connection = engine.cores.first.supervisor.core.connection
            connection.send(wire.Call(connection.incarnation, 2**40, name, args))
        else:
            with pytest.raises(EngineError, match=re.escape(words)):
                await engine.cores.call(name, None, *args)
        assert not await engine.is_paused()

    asyncio.run(run())


def test_draining_waits_for_every_request_and_its_timeout_names_how_many_are_left(engine):
    async def run():
        await engine.wait_for_requests_to_drain()
        tasks = [asyncio.create_task(rest(streaming(engine, 40))) for _ in range(3)]
        await eventually(num_running_is(engine, 3))
        await engine.pause_generation("keep", clear_cache=False)
        with pytest.raises(TimeoutError, match="3 requests have not ended"):
            await engine.wait_for_requests_to_drain(timeout=0.05)
        await engine.resume_generation()
        await engine.wait_for_requests_to_drain()
        assert await engine.get_num_unfinished_requests() == 0
        assert await is_empty(engine)
        assert [len((await task).token_ids) for task in tasks] == [40] * 3

    asyncio.run(run())


def num_running_is(llm, count):
    async def condition():
        return (await llm.core_status())["num_running"] == count

    return condition


def test_pause_holds_for_all_clients_and_outlives_the_client_that_called_it(small_model, operators, tmp_path):
    address = f"ipc://{tmp_path}/core.sock"
    with standalone_core(small_model, address, "--fault-injection", SLOW_STEPS, *operators):
        first, second = (
            AsyncLLM.connect(address, operator_key_file=operators[1]),
            AsyncLLM.connect(address, operator_key_file=operators[1]),
        )

        async def run():
            streams = [streaming(first), streaming(second, 60)]
            for stream in streams:
                await anext(stream)
            waiting = asyncio.create_task(first.pause_generation("wait"))
            await eventually(second.is_paused)
            first.shutdown()
            with pytest.raises(EngineDeadError):
                await waiting
            await second.pause_generation("wait")
            assert len((await rest(streams[1])).token_ids) == 60
            await eventually(lambda: is_empty(second))
            assert await second.is_paused()
            held = asyncio.create_task(rest(streaming(second, 5)))
            await eventually(num_waiting_is(second, 1))
            await second.resume_generation()
            assert len((await held).token_ids) == 5

        asyncio.run(run())
        second.shutdown()


def test_mode_abort_ends_the_requests_of_every_client(small_model, operators, tmp_path):
    address = f"ipc://{tmp_path}/core.sock"
    with standalone_core(small_model, address, "--fault-injection", SLOW_STEPS, *operators):
        first, second = (
            AsyncLLM.connect(address, operator_key_file=operators[1]),
            AsyncLLM.connect(address, operator_key_file=operators[1]),
        )

        async def run():
            streams = [streaming(first), streaming(second)]
            for stream in streams:
                await anext(stream)
            await first.pause_generation("abort")
            assert [(await rest(stream)).finish_reason for stream in streams] == ["abort"] * 2

        asyncio.run(run())
        for client in (first, second):
            client.shutdown()


@pytest.mark.parametrize(("mode", "sent"), [("wait", signal.SIGINT), ("keep", signal.SIGTERM)])
def test_core_told_to_stop_does_not_wait_for_requests_that_a_pause_holds_back(
    small_model, operators, tmp_path, mode, sent
):
    address = f"ipc://{tmp_path}/core.sock"
    with standalone_core(small_model, address, "--fault-injection", SLOW_STEPS, *operators) as process:
        client = AsyncLLM.connect(address, operator_key_file=operators[1], reconnect_timeout=0)

        async def run():
            stream = streaming(client, 100)
            await anext(stream)
            pausing = asyncio.create_task(client.pause_generation(mode, clear_cache=False))
            await eventually(client.is_paused)
            held = asyncio.create_task(answer(client, PROMPT, greedy(5)))
            await eventually(num_waiting_is(client, 1))
            process.send_signal(sent)
            await pausing
            if mode == "wait":
                assert len((await rest(stream)).token_ids) == 100, "the core did not finish the requests that still run"
            else:
                with pytest.raises(EngineDeadError):
                    await rest(stream)
            with pytest.raises(EngineDeadError):
                await held

        asyncio.run(asyncio.wait_for(run(), 120))
        client.shutdown()
        assert process.wait(30) == 0
