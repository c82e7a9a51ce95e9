"""A core dies on the GPU or because of it: its memory is freed, and its streams continue or end with the cause."""

import asyncio
import os
import signal

import pytest
from support.engine_fixtures import SLOW_STEPS
from support.gpu_device import DEVICE, ON_DEVICE, OPTIONS, SLACK_BYTES, device_memory_in_use
from transformers import LlamaConfig

from vllm_mp import EngineDeadError, EngineStartError, SamplingParams
from vllm_mp.testing.engines import answer, eventually, greedy, rest, running_engine
from vllm_mp.testing.greedy_parity import generate_all
from vllm_mp.testing.random_models import random_prompts, save_config

pytestmark = [*ON_DEVICE, pytest.mark.gpu_alone]

NUM_STREAMS = 32
# The memory that its core holds is much larger than SLACK_BYTES.
CONFIG = LlamaConfig(
    vocab_size=2048,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=8,
    max_position_embeddings=2048,
)
CAUSES = {
    "device_oom": "out of memory",
    "illegal_access": "illegal memory access",
    "device_assert": "device-side assert",
    "raise": "injected fault",
}
FAULTS = ["kill", *(fault for fault in CAUSES if (fault == "raise") == (DEVICE == "cpu"))]
"""On a CPU, an exception stands for the faults of a device, because a core survives no fault of a CPU."""


async def memory_is_back(before: int) -> bool:
    return await asyncio.to_thread(device_memory_in_use) <= before + SLACK_BYTES


async def start_streams(engine):
    """Start streams, wait for the first output of each, and return them; they do not end soon."""
    params = SamplingParams(max_tokens=2000, ignore_eos=True)
    streams = [engine.generate(prompt, params) for prompt in random_prompts((16,) * NUM_STREAMS)]
    await asyncio.gather(*(anext(stream) for stream in streams))
    return streams


async def drain(stream):
    async for _ in stream:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_config(CONFIG, tmp_path_factory.mktemp("llama"))


def test_core_killed_under_load_ends_its_streams_and_frees_its_memory(folder):
    before = device_memory_in_use()
    with running_engine(folder, **OPTIONS, recovery=False) as engine:
        answers = [output.outputs[0].token_ids for output in generate_all(engine, random_prompts((16, 5)), 8)]
        assert device_memory_in_use() > before + SLACK_BYTES, "the core holds no memory that could be freed"

        async def run():
            streams = await start_streams(engine)
            status = await engine.core_status()
            assert status["num_running"] == NUM_STREAMS
            os.kill(status["pid"], signal.SIGKILL)
            results = await asyncio.wait_for(
                asyncio.gather(*(drain(stream) for stream in streams), return_exceptions=True), 20
            )
            for result in results:
                assert isinstance(result, EngineDeadError)
                assert "SIGKILL" in str(result)
            await eventually(lambda: memory_is_back(before), timeout=60)

        asyncio.run(run())
        # The dead engine still exists, and nothing of it may hinder the next engine.
        with running_engine(folder, **OPTIONS) as successor:
            again = [output.outputs[0].token_ids for output in generate_all(successor, random_prompts((16, 5)), 8)]
    assert again == answers
    asyncio.run(eventually(lambda: memory_is_back(before), timeout=60))


@pytest.mark.parametrize("fault", FAULTS)
def test_streams_continue_unchanged_on_the_next_core(folder, fault):
    before = device_memory_in_use()
    prompts = random_prompts((16,) * NUM_STREAMS)
    injected = "" if fault == "kill" else f"{fault}@request=struck,position=7,once"
    with running_engine(folder, **OPTIONS, fault_injection=injected) as engine:
        expected = [output.outputs[0].token_ids for output in generate_all(engine, prompts, 60)]
        held = device_memory_in_use()

        async def run():
            ids = [f"plain-{i}" for i in range(NUM_STREAMS - 1)] + ["struck"]
            params = greedy(60, ignore_eos=True)
            answers = asyncio.gather(*map(answer, [engine] * NUM_STREAMS, prompts, [params] * NUM_STREAMS, ids))

            async def all_under_way():
                live = [answer for _, answer in engine.cores.first.requests.live()]
                return len(live) == NUM_STREAMS and all(len(answer.token_ids) > 3 for answer in live)

            if fault == "kill":
                await eventually(all_under_way)
                os.kill((await engine.core_status())["pid"], signal.SIGKILL)
            found = [output.outputs[0].token_ids for output in await answers]
            status = await engine.core_status()
            assert status["restarts"] == 1
            assert fault == "kill" or status["num_found_blocks"] == 0, "a KV cache was used that may be damaged"
            await eventually(lambda: memory_is_back(held), timeout=60)
            return found

        assert asyncio.run(run()) == expected
    asyncio.run(eventually(lambda: memory_is_back(before), timeout=60))


def test_prompts_are_not_read_again_on_the_core_after_a_killed_one(folder):
    before = device_memory_in_use()
    prompts = random_prompts((300,) * 4)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with running_engine(folder, **OPTIONS, fault_injection=SLOW_STEPS) as engine:
        expected = [output.outputs[0].token_ids for output in generate_all(engine, prompts, 60)]
        held = device_memory_in_use()

        async def answer_through_a_kill():
            before = await engine.core_status()
            streams = [engine.generate(prompt, params) for prompt in prompts]
            await asyncio.gather(*(anext(stream) for stream in streams))
            os.kill(before["pid"], signal.SIGKILL)
            assert [(await rest(stream)).token_ids for stream in streams] == expected
            status = await engine.core_status()
            assert status["restarts"] == before["restarts"] + 1
            assert status["num_found_blocks"] > 0
            assert status["num_recomputed_tokens"] == 0
            await eventually(lambda: memory_is_back(held), timeout=60)

        async def run():
            await answer_through_a_kill()
            await answer_through_a_kill()  # this core uses what the first one has allocated
            await engine.sleep()
            assert device_memory_in_use() < held
            await engine.wake_up()
            await answer_through_a_kill()

        asyncio.run(run())
    asyncio.run(eventually(lambda: memory_is_back(before), timeout=60))


@pytest.mark.parametrize("fault", FAULTS[1:])
def test_streams_without_recovery_end_with_the_cause(folder, fault):
    options = {**OPTIONS, "fault_injection": f"{fault}@request=struck,position=7", "recovery": False}

    async def run(engine):
        with pytest.raises(EngineDeadError, match=CAUSES[fault]):
            await answer(engine, random_prompts((16,))[0], greedy(60, ignore_eos=True), "struck")

    with running_engine(folder, **options) as engine:
        asyncio.run(run(engine))


@pytest.mark.parametrize("fault", FAULTS[1:])
def test_device_that_fails_during_load_is_named_by_the_start_error(folder, fault):
    before = device_memory_in_use()
    with (
        pytest.raises(EngineStartError, match=CAUSES[fault]),
        running_engine(folder, **OPTIONS, fault_injection=f"{fault}@load"),
    ):
        pass
    asyncio.run(eventually(lambda: memory_is_back(before), timeout=60))
