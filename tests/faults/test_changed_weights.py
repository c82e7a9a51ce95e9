"""The weights of the model change on disk: no stream goes on with other weights than those with which it began."""

import asyncio
import contextlib
import os
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine_fixtures import SLOW_STEPS

from vllm_mp import AsyncLLM, EngineStartError, RequestInterruptedError
from vllm_mp.client.cores.sources.launcher import CoreLauncher
from vllm_mp.client.cores.sources.remote_core import RemoteCore
from vllm_mp.testing.engines import eventually, greedy, rest, running_engine, standalone_core

pytestmark = pytest.mark.usefixtures("forked_cores")

PROMPT = "The capital of France is"
LONG_PROMPT = "The river runs through the old town, past the mill and the bridges, and then to the sea. " * 4


@pytest.fixture
def folder(small_model, tmp_path):
    """A copy of a small model."""
    return shutil.copytree(small_model, tmp_path / "model")


def change_weights(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({name: tensor.flip(0) for name, tensor in tensors.items()}, folder / "new", {"format": "pt"})
    (folder / "new").replace(path)
    assert any(not torch.equal(tensor, tensor.flip(0)) for tensor in tensors.values())


async def tokens(engine, count=8, rank=None, prompt=PROMPT):
    return (await rest(engine.generate(prompt, greedy(count, ignore_eos=True), data_parallel_rank=rank))).token_ids


async def begin(engine, count=500):
    """Return the task of an answer that has begun."""
    task = asyncio.create_task(tokens(engine, count))

    async def has_begun():
        return any(completion.token_ids for _, completion in engine.cores.first.requests.live())

    await eventually(has_begun)
    return task


def test_core_of_other_weights_continues_no_stream_after_a_death_and_serves_new_requests(folder):
    with running_engine(folder, core_template=False, fault_injection=SLOW_STEPS) as engine:

        async def run():
            before = await tokens(engine)
            begun = await begin(engine)
            change_weights(folder)
            engine.cores.first.supervisor.core.process.kill()
            with pytest.raises(RequestInterruptedError, match="core that is to continue it has other weights; send it"):
                await begun
            after = await tokens(engine)
            assert after != before
            assert await tokens(engine) == after

        asyncio.run(run())


def test_core_is_not_replaced_by_one_of_other_weights_unless_they_were_loaded_on_purpose(folder):
    with running_engine(folder) as engine:

        async def run():
            before, pid = await tokens(engine), (await engine.core_status())["pid"]
            change_weights(folder)
            with pytest.raises(EngineStartError, match="was to replace the core has other weights, because"):
                await engine.restart_core()
            assert (await engine.core_status())["pid"] == pid
            assert await tokens(engine) == before
            await engine.sleep(level=2)
            await engine.wake_up()
            after = await tokens(engine)
            assert after != before
            await engine.restart_core()
            assert (await engine.core_status())["pid"] != pid
            assert await tokens(engine) == after

        asyncio.run(run())


def test_process_that_was_forked_ahead_with_former_weights_does_not_become_the_core(folder, monkeypatch):
    monkeypatch.setattr("vllm_mp.client.cores.sources.launcher._AHEAD_DELAY_S", 0.0)

    async def run(engine):
        source = engine.cores.first.supervisor._source

        async def has_standby():
            return source._standby is not None and source._standby.is_waiting()

        await eventually(has_standby)
        monkeypatch.setattr(CoreLauncher, "_fork_ahead", lambda self: None)  # the death comes before the next look
        await engine.sleep(level=2)
        change_weights(folder)
        await engine.wake_up()
        after = await tokens(engine, 60)
        begun = await begin(engine, 60)
        engine.cores.first.supervisor.core.process.kill()
        assert await begun == after
        assert await tokens(engine, 60) == after

    with running_engine(folder, fault_injection=SLOW_STEPS) as engine:
        asyncio.run(run(engine))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefix_cache_file": "prefixes"},
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("tags", [None, ["kv_cache"]], ids=["at-once", "cache-first"])
def test_keys_and_values_of_former_weights_are_not_used_by_a_core_of_others(folder, tmp_path, options, tags):
    options = {**options, "core_template": False}
    if "prefix_cache_file" in options:
        options["prefix_cache_file"] = str(tmp_path / "prefixes")

    async def run(engine):
        first = await tokens(engine, prompt=LONG_PROMPT)
        await engine.sleep(level=2)
        change_weights(folder)
        if tags:
            await engine.wake_up(tags)
        await engine.wake_up()
        second = await tokens(engine, prompt=LONG_PROMPT)
        assert second != first
        change_weights(folder)  # as they were first
        engine.cores.first.supervisor.core.process.kill()
        assert await tokens(engine, prompt=LONG_PROMPT) == first
        return first

    with running_engine(folder, **options) as engine:
        first = asyncio.run(run(engine))
    with running_engine(folder, **options) as engine:
        assert asyncio.run(tokens(engine, prompt=LONG_PROMPT)) == first


def test_keys_and_values_of_weights_that_were_loaded_on_purpose_are_found_after_a_death(folder):
    async def run(engine):
        await engine.sleep(level=2)
        change_weights(folder)
        await engine.wake_up()
        after = await tokens(engine, prompt=LONG_PROMPT)
        engine.cores.first.supervisor.core.process.kill()
        assert await tokens(engine, prompt=LONG_PROMPT) == after
        assert (await engine.core_status())["num_found_blocks"] > 0

    with running_engine(folder) as engine:
        asyncio.run(run(engine))


@pytest.mark.parametrize("sees_page", [True, False])
def test_clients_go_on_after_the_death_of_a_shared_core_that_has_loaded_other_weights_on_purpose(
    folder, tmp_path, operators, monkeypatch, sees_page
):
    if not sees_page:
        monkeypatch.setattr(RemoteCore, "_open_page", lambda self: None)
    address = f"ipc://{tmp_path}/core.sock"

    async def run():
        async with contextlib.AsyncExitStack() as stack:
            operator, other = [
                await stack.enter_async_context(AsyncLLM.connect(address, operator_key_file=key_file))
                for key_file in (operators[1], None)
            ]
            before = await tokens(other)
            await operator.sleep(level=2)
            sleeper = await stack.enter_async_context(AsyncLLM.connect(address))
            change_weights(folder)
            await operator.wake_up()
            clients = [operator, other, sleeper, await stack.enter_async_context(AsyncLLM.connect(address))]
            after = await tokens(other, 60)
            assert after[: len(before)] != before
            for _ in range(2):
                begun = [await begin(client, 60) for client in clients]
                os.kill((await operator.core_status())["pid"], signal.SIGKILL)
                assert await asyncio.gather(*begun) == [after] * len(clients)

    flags = ("--fault-injection", SLOW_STEPS, *operators)
    with standalone_core(folder, address, *flags):
        asyncio.run(run())


def test_engine_that_has_loaded_other_weights_on_purpose_is_taken_over_with_its_streams(folder, tmp_path, operators):
    address = f"ipc://{tmp_path}/core.sock"
    flags = ("--fault-injection", SLOW_STEPS, *operators)

    async def run():
        async with AsyncLLM.connect(address, operator_key_file=operators[1]) as client:
            await client.sleep(level=2)
            change_weights(folder)
            await client.wake_up()
            expected, pid = await tokens(client, 200), (await client.core_status())["pid"]
            begun = await begin(client, 200)
            with standalone_core(folder, address, *flags, "--takeover"):
                assert await begun == expected

                async def is_taken_over():
                    return (await client.core_status())["pid"] != pid

                await eventually(is_taken_over)
                assert await tokens(client, 200) == expected

    with standalone_core(folder, address, *flags):
        asyncio.run(run())


def test_one_of_several_cores_that_comes_back_with_other_weights_is_left_out_until_all_have_them(folder):
    async def states(engine):
        return [core["state"] for core in (await engine.core_status())["cores"]]

    async def run(engine):
        before = await tokens(engine)
        change_weights(folder)
        engine.cores.clients[1].supervisor.core.process.kill()

        async def is_left_out():
            return (await states(engine))[1] == "LEFT_OUT"

        await eventually(is_left_out)
        assert [await tokens(engine, rank=rank) for rank in (0, 1, None)] == [before] * 3
        with pytest.raises(EngineStartError, match="have different models: other weights; add a core of the same"):
            await engine.add_core()
        await engine.sleep(level=2)
        await engine.wake_up()
        assert "LEFT_OUT" not in await states(engine)
        first, second = [await tokens(engine, rank=rank) for rank in (0, 1)]
        assert first == second != before

    with running_engine(folder, data_parallel_size=2, core_template=False) as engine:
        asyncio.run(run(engine))
