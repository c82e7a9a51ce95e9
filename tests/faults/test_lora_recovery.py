"""LoRA adapters and their requests after the death of the core, private or shared."""

import asyncio
import os
import shutil
import signal

import pytest
from support.engine_fixtures import SLOW_STEPS
from support.lora_engines import ADAPTERS, LORA, PROMPT, save_adapters, tokens, tokens_of_all

from vllm_mp import AsyncEngineArgs, AsyncLLM, EngineGenerateError, LoRARequest, NotOperatorError
from vllm_mp.keys.operator_key import ensure_operator_key
from vllm_mp.testing.adapters import adapter_tensors, save_adapter
from vllm_mp.testing.engines import eventually, greedy, running_engine, standalone_core

pytestmark = pytest.mark.usefixtures("forked_programs")

PARAMS = greedy(24, ignore_eos=True)
NUM_STREAMS = 16


@pytest.fixture(scope="module")
def adapters(small_model, tmp_path_factory):
    return save_adapters(small_model, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def lora(small_model):
    """An engine whose core may die often."""
    with running_engine(small_model, **LORA, fault_injection=SLOW_STEPS, max_core_restarts=1000) as engine:
        yield engine


@pytest.fixture(scope="module")
def shared(small_model, tmp_path_factory):
    """(address, operator key file) of a core that is started again when it dies."""
    folder = tmp_path_factory.mktemp("core")
    address, key_file = f"ipc://{folder}/core.sock", str(folder / "operators")
    ensure_operator_key(key_file)
    flags = ("--operator-key-file", key_file, "--fault-injection", SLOW_STEPS, "--max-core-restarts", "1000")
    flags += ("--enable-lora", "--max-loras", "2", "--max-cpu-loras", "3", "--check-invariants")
    with standalone_core(small_model, address, *flags):
        yield address, key_file


async def kill(engine):
    """Kill the core, and return when its successor serves."""
    before = (await engine.core_status())["restarts"]
    os.kill((await engine.core_status())["pid"], signal.SIGKILL)

    async def is_replaced():
        return (await engine.core_status())["restarts"] > before

    await eventually(is_replaced)


async def under_way(engine, task):
    """Return once a third of the streams of `engine`, which `task` reads, have some tokens, or have all ended."""

    async def condition():
        live = engine.cores.first.requests.live()
        return task.done() or 3 * sum(len(completion.token_ids) >= 2 for _, completion in live) >= len(live) > 0

    await eventually(condition)


def test_all_streams_of_four_adapters_end_with_the_same_tokens_when_the_core_is_killed(lora, adapters):
    async def run():
        expected = await tokens_of_all(lora, adapters, PARAMS, NUM_STREAMS)
        assert len(set(map(tuple, expected))) == ADAPTERS + 1
        task = asyncio.create_task(tokens_of_all(lora, adapters, PARAMS, NUM_STREAMS))
        for _ in range(2):
            await under_way(lora, task)
            await kill(lora)
        assert await task == expected

    asyncio.run(run())


def test_adapters_and_pins_are_there_again_after_the_death_of_the_core(lora, adapters):
    async def run():
        for number in range(1, ADAPTERS + 1):
            await lora.add_lora(adapters[number])
        await lora.pin_lora(2)
        listed = await lora.list_loras()
        assert listed == {1, 2, 3, 4}
        await kill(lora)
        assert await lora.list_loras() == listed
        assert not await lora.add_lora(adapters[1])
        await kill(lora)
        await lora.pin_lora(1)
        with pytest.raises(EngineGenerateError, match="all 2 slots are pinned by other adapters"):
            await tokens(lora, adapters[4], PARAMS)
        for number in range(1, ADAPTERS + 1):
            assert await lora.remove_lora(number)
        await kill(lora)
        assert await lora.list_loras() == set()

    asyncio.run(run())


@pytest.mark.parametrize("change", ["other weights", pytest.param("no folder", marks=pytest.mark.slow)])
def test_files_that_change_before_the_death_fail_their_requests_alone(lora, adapters, small_model, tmp_path, change):
    shutil.copytree(adapters[1].lora_path, tmp_path / "own")
    own = LoRARequest("own", 50, str(tmp_path / "own"))

    async def run():
        await lora.add_lora(own)
        expected = await tokens_of_all(lora, adapters, PARAMS, 5)
        others = asyncio.create_task(tokens_of_all(lora, adapters, PARAMS, 5))
        doomed = asyncio.create_task(tokens(lora, own, greedy(200, ignore_eos=True)))
        await under_way(lora, others)
        await eventually(lambda: has_tokens(lora, "own"))
        if change == "no folder":
            shutil.rmtree(own.lora_path)
        else:
            architecture = AsyncEngineArgs(model=str(small_model)).create_engine_config().model_config.architecture
            save_adapter(tmp_path / "own", adapter_tensors(architecture, 8, seed=77))
        await kill(lora)
        words = "is not a folder" if change == "no folder" else "its files have changed since it was first loaded"
        with pytest.raises(EngineGenerateError, match=rf"adapter 'own' \(id 50\) cannot be loaded: .*{words}"):
            await doomed
        assert await others == expected
        assert await lora.remove_lora(50)

    asyncio.run(run())


def test_streams_of_adapters_that_were_replaced_or_removed_keep_their_weights_when_the_core_is_killed(lora, adapters):
    params = greedy(100, ignore_eos=True)
    replaced = LoRARequest("replaced", 60, adapters[1].lora_path)
    removed = LoRARequest("removed", 61, adapters[2].lora_path)

    async def run():
        expected = [await tokens(lora, request, params) for request in (replaced, removed)]
        streams = [asyncio.create_task(tokens(lora, request, params)) for request in (replaced, removed)]
        for request in (replaced, removed):
            await eventually(lambda request=request: has_tokens(lora, request.lora_name))
        now = LoRARequest("replaced", 60, adapters[3].lora_path)
        await lora.add_lora(LoRARequest(now.lora_name, now.lora_int_id, now.lora_path, load_inplace=True))
        assert await lora.remove_lora(61)
        await lora.add_lora(LoRARequest("another", 61, adapters[4].lora_path))
        for _ in range(2):
            await kill(lora)
        assert not any(stream.done() for stream in streams)
        assert await asyncio.gather(*streams) == expected
        assert await tokens(lora, now, PARAMS) == await tokens(lora, adapters[3], PARAMS)
        for number in (60, 61):
            assert await lora.remove_lora(number)

    asyncio.run(run())


async def has_tokens(engine, name):
    """Return whether a live request with the adapter `name` has tokens."""
    return any(
        completion.token_ids
        for stream, completion in engine.cores.first.requests.live()
        if stream._request.lora and stream._request.lora.lora_name == name
    )


def test_plain_client_of_a_shared_core_uses_what_an_operator_has_loaded_and_opens_no_folder(shared, adapters):
    address, key_file = shared
    operator = AsyncLLM.connect(address, operator_key_file=key_file)
    plain = AsyncLLM.connect(address)

    async def run():
        with pytest.raises(NotOperatorError, match="have an operator call add_lora"):
            await tokens(plain, adapters[1], PARAMS)
        for call in (plain.add_lora(adapters[1]), plain.remove_lora(1), plain.pin_lora(1)):
            with pytest.raises(NotOperatorError, match="_lora is for operators"):
                await call
        assert await plain.list_loras() == set()
        for number in range(1, ADAPTERS + 1):
            await operator.add_lora(adapters[number])
        by_name = {number: lora and LoRARequest(lora.lora_name, number, "unknown") for number, lora in adapters.items()}
        expected = await tokens_of_all(operator, adapters, PARAMS, NUM_STREAMS)
        task = asyncio.create_task(tokens_of_all(plain, by_name, PARAMS, NUM_STREAMS))
        await under_way(plain, task)
        await kill(operator)
        assert await task == expected
        assert await plain.list_loras() == {1, 2, 3, 4}

    try:
        asyncio.run(run())
    finally:
        operator.shutdown()
        plain.shutdown()


def test_stream_of_a_plain_client_outlives_the_removal_of_its_adapter_and_the_core(shared, adapters):
    address, key_file = shared
    operator = AsyncLLM.connect(address, operator_key_file=key_file)
    plain = AsyncLLM.connect(address)
    by_name, params = LoRARequest("removed", 70, "unknown"), greedy(100, ignore_eos=True)

    async def run():
        await operator.add_lora(LoRARequest("removed", 70, adapters[1].lora_path))
        expected = await tokens(plain, by_name, params)
        stream = asyncio.create_task(tokens(plain, by_name, params))
        await eventually(lambda: has_tokens(plain, "removed"))
        assert await operator.remove_lora(70)
        await kill(operator)
        assert await stream == expected
        with pytest.raises(NotOperatorError, match="have an operator call add_lora"):
            await tokens(plain, by_name, params)

    try:
        asyncio.run(run())
    finally:
        operator.shutdown()
        plain.shutdown()


@pytest.mark.slow
def test_adapters_of_the_configuration_are_served_before_and_after_a_death(small_model, adapters):
    modules = tuple(f"{adapters[number].lora_name}={adapters[number].lora_path}" for number in (1, 2))
    with running_engine(small_model, **LORA, lora_modules=modules) as engine:

        async def run():
            assert await engine.list_loras() == {1, 2}
            expected = await tokens(engine, adapters[1], PARAMS, PROMPT)
            await kill(engine)
            assert await engine.list_loras() == {1, 2}
            assert await tokens(engine, adapters[1], PARAMS, PROMPT) == expected

        asyncio.run(run())
