"""The weights of the model change on disk: no stream goes on with other weights than those with which it began."""

import asyncio
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine_fixtures import SLOW_STEPS

from vllm_mp import EngineStartError, RequestInterruptedError
from vllm_mp.testing.engines import answer, eventually, greedy, running_engine

pytestmark = pytest.mark.usefixtures("forked_cores")

PROMPT = "The capital of France is"


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


async def tokens(engine, count=8):
    return (await answer(engine, PROMPT, greedy(count, ignore_eos=True))).outputs[0].token_ids


def test_core_of_other_weights_continues_no_stream_after_a_death_and_serves_new_requests(folder):
    with running_engine(folder, core_template=False, fault_injection=SLOW_STEPS) as engine:

        async def run():
            before = await tokens(engine)
            begun = asyncio.create_task(tokens(engine, 500))

            async def has_begun():
                return any(completion.token_ids for _, completion in engine.cores.first.requests.live())

            await eventually(has_begun)
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
