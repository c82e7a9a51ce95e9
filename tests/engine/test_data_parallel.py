"""An engine with several cores: one model in each, requests on all of them."""

import asyncio
import os
import signal

import psutil
import pytest
from support.engine_fixtures import SLOW_STEPS

from vllm_mp import (
    AsyncEngineArgs,
    AsyncLLM,
    EngineDeadError,
    EngineGenerateError,
    SamplingParams,
)
from vllm_mp.testing.engines import eventually, greedy, is_empty, rest, running_engine

pytestmark = pytest.mark.usefixtures("forked_cores")

PROMPTS = [f"{subject} is known for" for subject in ("The river", "A castle", "This song", "Her garden")]


def sampled(max_tokens, seed, **params):
    return SamplingParams(temperature=0.9, seed=seed, max_tokens=max_tokens, ignore_eos=True, **params)


@pytest.fixture(scope="module")
def engine(small_model):
    with running_engine(
        small_model, data_parallel_size=2, max_core_restarts=1000, num_threads=1, fault_injection=SLOW_STEPS
    ) as engine:
        yield engine


def kill(client, signum=signal.SIGKILL):
    os.kill(client.supervisor.core.process.pid, signum)


async def is_serving(engine):
    return all(client.has_core for client in engine.cores.clients)


async def tokens_of(engine, prompt, params, **options):
    """Return the token ids of all completions."""
    async for output in engine.generate(prompt, params, **options):
        last = output
    return [completion.token_ids for completion in last.outputs]


def cases():
    """Return prompts and parameters: greedy, sampled with a seed, and several completions."""
    return [
        (prompt, params)
        for i, prompt in enumerate(PROMPTS)
        for params in (
            SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
            sampled(30, seed=i),
            sampled(20, seed=10 + i, n=2),
        )
    ]


def test_each_core_gives_the_same_answers_and_requests_use_both(engine):
    async def run():
        on_each = [
            await asyncio.gather(*(tokens_of(engine, *case, data_parallel_rank=rank) for case in cases()))
            for rank in (0, 1)
        ]
        assert on_each[0] == on_each[1]
        before = [core["step"] for core in (await engine.core_status())["cores"]]
        assert await asyncio.gather(*(tokens_of(engine, *case) for case in cases())) == on_each[0]
        after = [core["step"] for core in (await engine.core_status())["cores"]]
        assert all(now > then for now, then in zip(after, before, strict=True))

    asyncio.run(run())


def test_chat_is_pinned_to_a_rank_and_an_unknown_rank_is_refused(engine):
    async def run():
        messages = [{"role": "user", "content": "Hello"}]
        steps = [core["step"] for core in (await engine.core_status())["cores"]]
        template = "{{ messages[0].content }}"
        await rest(engine.chat(messages, greedy(3), chat_template=template, data_parallel_rank=1))
        after = [core["step"] for core in (await engine.core_status())["cores"]]
        assert (after[0], after[1] > steps[1]) == (steps[0], True)
        with pytest.raises(ValueError, match="data_parallel_rank=2: the ranks are 0, 1; leave it None"):
            await tokens_of(engine, PROMPTS[0], greedy(3), data_parallel_rank=2)

    asyncio.run(run())


def test_request_goes_to_the_core_that_holds_its_prefix(engine):
    async def run():
        prompt = list(range(1000, 1400))
        await tokens_of(engine, prompt, greedy(1), data_parallel_rank=1)
        for _ in range(3):
            async for output in engine.generate(prompt, greedy(1)):
                last = output
            assert last.num_cached_tokens >= 384
        assert await engine.reset_prefix_cache()
        async for output in engine.generate(prompt, greedy(1)):
            last = output
        assert last.num_cached_tokens == 0

    asyncio.run(run())


@pytest.mark.essential
@pytest.mark.parametrize("rank", [0, 1])
def test_streams_of_a_killed_core_go_on_with_the_same_tokens(engine, rank):
    async def run():
        expected = await asyncio.gather(*(tokens_of(engine, *case) for case in cases()))
        tasks = [asyncio.create_task(tokens_of(engine, *case, request_id=str(i))) for i, case in enumerate(cases())]
        client = engine.cores.client(rank)

        async def have_begun():
            streams = client.requests.streams()
            return len(streams) >= 4 and all(stream.awaited[0].num_tokens for stream in streams)

        await eventually(have_begun)
        restarts = client.supervisor.num_restarts
        kill(client)
        assert await asyncio.gather(*tasks) == expected
        await eventually(lambda: is_serving(engine))
        assert client.supervisor.num_restarts == restarts + 1
        await eventually(lambda: is_empty(engine))

    asyncio.run(run())


def test_core_that_rejoins_is_in_the_pause_that_began_while_it_was_away(engine):
    async def run():
        await engine.check_health()
        kill(engine.cores.client(1))

        async def is_noticed():
            return not engine.cores.client(1).has_core

        await eventually(is_noticed)
        await engine.pause_generation("keep")
        await eventually(lambda: is_serving(engine))
        status = await engine.core_status()
        assert [core["is_paused"] for core in status["cores"]] == [True, True]
        task = asyncio.create_task(tokens_of(engine, PROMPTS[0], greedy(3), data_parallel_rank=1))
        await engine.resume_generation()
        assert not await engine.is_paused()
        await task

    asyncio.run(run())


def test_calls_reach_every_core(engine):
    async def run():
        assert len(await engine.collective_rpc("get_num_parameters")) == 2
        await engine.sleep(1, mode="keep")
        assert [core["is_sleeping"] for core in (await engine.core_status())["cores"]] == [True, True]
        assert await engine.wake_up()
        status = await engine.core_status()
        assert [core["rank"] for core in status["cores"]] == [0, 1]
        assert status["total_blocks"] == sum(core["total_blocks"] for core in status["cores"])
        assert len({core["pid"] for core in status["cores"]}) == 2
        await engine.check_health()

    asyncio.run(run())


def test_cores_are_drained_added_and_removed_while_streams_run(engine):
    async def run():
        expected = await asyncio.gather(*(tokens_of(engine, *case) for case in cases()))
        tasks = [asyncio.create_task(tokens_of(engine, *case)) for case in cases()]
        rank = await engine.add_core()
        assert engine.core_ranks == [0, 1, rank]
        assert await tokens_of(engine, *cases()[0], data_parallel_rank=rank) == expected[0]
        assert await asyncio.gather(*tasks) == expected

        tasks = [asyncio.create_task(tokens_of(engine, *case, request_id=str(i))) for i, case in enumerate(cases())]

        async def have_begun():
            return len(engine.cores.client(rank).requests.streams()) >= 2

        await eventually(have_begun)
        pid = (await engine.core_status())["cores"][2]["pid"]
        await engine.remove_core(rank)
        assert engine.core_ranks == [0, 1]
        assert await asyncio.gather(*tasks) == expected
        assert not psutil.pid_exists(pid)

        tasks = [asyncio.create_task(tokens_of(engine, *case)) for case in cases()]
        await asyncio.sleep(0)
        await engine.drain_core(0)
        steps = (await engine.core_status())["cores"][0]["step"]
        await tokens_of(engine, *cases()[0])
        status = (await engine.core_status())["cores"][0]
        assert (status["step"], status["state"]) == (steps, "DRAINING")
        await engine.resume_core(0)
        assert await asyncio.gather(*tasks) == expected

    asyncio.run(run())


def test_added_core_enters_the_pause_in_force(engine):
    async def run():
        await engine.pause_generation("keep")
        rank = await engine.add_core()
        try:
            assert [core["is_paused"] for core in (await engine.core_status())["cores"]] == [True] * 3
        finally:
            await engine.resume_generation()
            await engine.remove_core(rank)

    asyncio.run(run())


def test_engine_goes_on_with_the_other_core_if_one_is_gone_for_good_and_ends_with_the_last(small_model):
    async def run(engine):
        expected = await asyncio.gather(*(tokens_of(engine, *case) for case in cases()))
        tasks = [asyncio.create_task(tokens_of(engine, *case)) for case in cases()]
        client = engine.cores.client(0)

        async def have_begun():
            return len(client.requests.streams()) >= 4

        await eventually(have_begun)
        kill(client)
        assert await asyncio.gather(*tasks) == expected
        states = [core["state"] for core in engine.last_core_status()["cores"]]
        assert (states[0], engine.errored) == ("DEAD", False)
        await engine.pause_generation("keep")
        added = await engine.add_core()
        assert [core["is_paused"] for core in (await engine.core_status())["cores"][1:]] == [True, True]
        await engine.resume_generation()
        await engine.remove_core(added)
        endless = asyncio.create_task(tokens_of(engine, PROMPTS[0], sampled(900, 1)))
        await eventually(is_running_on(engine, 1))
        kill(engine.cores.client(1))
        with pytest.raises(EngineDeadError, match="max_core_restarts=0"):
            await endless
        assert engine.errored

    with running_engine(
        small_model, data_parallel_size=2, max_core_restarts=0, num_threads=1, fault_injection=SLOW_STEPS
    ) as engine:
        asyncio.run(run(engine))


def is_running_on(engine, rank):
    async def condition():
        return bool(engine.cores.client(rank).requests.streams())

    return condition


@pytest.mark.essential
def test_poison_request_fails_alone_and_all_others_complete(small_model):
    async def run(engine):
        expected = await asyncio.gather(*(tokens_of(engine, *case) for case in cases()))
        tasks = [asyncio.create_task(tokens_of(engine, *case)) for case in cases()]
        with pytest.raises(EngineGenerateError, match="in the step of each of"):
            await tokens_of(engine, "The end", greedy(5), request_id="poison")
        assert await asyncio.gather(*tasks) == expected
        await eventually(lambda: is_serving(engine))
        restarts = (await engine.core_status())["restarts"]
        assert 2 <= restarts <= 6

    faults = f"{SLOW_STEPS};segv@request=poison"
    with running_engine(small_model, data_parallel_size=2, num_threads=1, fault_injection=faults) as engine:
        asyncio.run(run(engine))


@pytest.mark.parametrize("max_restarts", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_poison_request_ends_at_most_two_cores_for_good(small_model, max_restarts):
    async def run(engine):
        expected = await asyncio.gather(*(tokens_of(engine, *case) for case in cases()))
        tasks = [asyncio.create_task(tokens_of(engine, *case)) for case in cases()]
        with pytest.raises(EngineGenerateError, match=r"in the step of each of .* alone in the last"):
            await tokens_of(engine, "The end", greedy(5), request_id="poison")
        assert await asyncio.gather(*tasks) == expected
        assert sum(client.dead_error is not None for client in engine.cores.clients) <= 2

    faults = f"{SLOW_STEPS};segv@request=poison"
    options = {"data_parallel_size": 3, "max_core_restarts": max_restarts, "num_threads": 1}
    with running_engine(small_model, fault_injection=faults, **options) as engine:
        asyncio.run(run(engine))


def test_cpus_are_divided_among_the_cores(engine):
    cpus = [client.supervisor.core.config.device_config.cpus for client in engine.cores.clients]
    usable = os.sched_getaffinity(0)
    bound = [os.sched_getaffinity(client.supervisor.core.process.pid) for client in engine.cores.clients]
    assert all(cpus)
    assert all(each < usable or len(usable) == 1 for each in bound)
    if len(usable) >= 2:
        assert not bound[0] & bound[1]


def test_core_that_is_added_takes_the_place_of_one_that_was_removed(engine):
    async def cpus_of_cores():
        cores = (await engine.core_status())["cores"]
        return [psutil.Process(core["pid"]).cpu_affinity() for core in cores]

    async def run():
        first, second = await cpus_of_cores()
        await engine.remove_core(engine.core_ranks[1])
        await engine.add_core()
        assert await cpus_of_cores() == [first, second]

    asyncio.run(run())


def test_address_is_refused_for_an_engine_with_own_cores(engine):
    with pytest.raises(ValueError, match="address='ipc:///nowhere': this engine starts its cores itself"):
        asyncio.run(engine.add_core("ipc:///nowhere"))


def test_engine_without_any_address_is_refused():
    with pytest.raises(ValueError, match="must name at least one core, and each core once"):
        AsyncLLM.connect([])
    with pytest.raises(ValueError, match="key_file=\\['a'\\] must be one file, or one for each of 2 addresses"):
        AsyncLLM.connect("tcp://a:1,tcp://b:1", key_file=["a"])


def test_number_of_cores_has_bounds():
    with pytest.raises(ValueError, match="data_parallel_size"):
        AsyncEngineArgs(data_parallel_size=0)
