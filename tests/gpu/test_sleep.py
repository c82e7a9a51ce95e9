"""An engine that sleeps on the GPU frees its memory, and gives the same answers after it wakes up."""

import asyncio

import pytest
import torch
from support.gpu_device import CACHE_BYTES, DEVICE, ON_DEVICE, OPTIONS, SLACK_BYTES, device_memory_in_use
from transformers import GPTNeoXConfig, LlamaConfig

from vllm_mp import EngineError, SamplingParams
from vllm_mp.core.worker.memory.plan import free_cuda_memory
from vllm_mp.testing.engines import eventually, is_empty, rest, running_engine
from vllm_mp.testing.greedy_parity import generate_all
from vllm_mp.testing.random_models import SIZES, random_prompts, save_config

pytestmark = [*ON_DEVICE, pytest.mark.gpu_alone]

# Weights and cache are much larger than SLACK_BYTES.
CONFIG = LlamaConfig(
    vocab_size=2048,
    hidden_size=1024,
    intermediate_size=2048,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=8,
    max_position_embeddings=2048,
)
WEIGHT_BYTES = 4 * (8 * (4 * 1024 * 1024 + 3 * 1024 * 2048) + 2 * 2048 * 1024)
PROMPTS = random_prompts((16,) * 8)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with running_engine(save_config(CONFIG, tmp_path_factory.mktemp("llama")), **OPTIONS) as engine:
        yield engine


async def start_streams(engine):
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    streams = [engine.generate(prompt, params) for prompt in PROMPTS]
    await asyncio.gather(*(anext(stream) for stream in streams))
    return streams


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_frees_memory_and_answers_after_wake_up_are_the_same(engine, level):
    # On a CPU, level 1 keeps the weights, and unwritten parts of a cache take no memory.
    freed = WEIGHT_BYTES * (level - 1) if DEVICE == "cpu" else WEIGHT_BYTES + CACHE_BYTES

    async def run():
        streams = await start_streams(engine)
        held = device_memory_in_use()
        await engine.sleep(level, mode="keep")
        assert device_memory_in_use() <= held - freed + SLACK_BYTES
        await engine.wake_up()
        answers = [(await rest(stream)).token_ids for stream in streams]
        assert device_memory_in_use() <= held + SLACK_BYTES
        await eventually(lambda: is_empty(engine))
        return answers

    expected = [output.outputs[0].token_ids for output in generate_all(engine, PROMPTS, 60)]
    assert asyncio.run(run()) == expected
    assert [output.outputs[0].token_ids for output in generate_all(engine, PROMPTS, 60)] == expected


@pytest.mark.parametrize("level", [1, 2])
def test_engine_stays_asleep_when_its_memory_is_taken(engine, level):
    if DEVICE == "cpu":
        pytest.skip("the test would take all of the host's memory")
    device = torch.device("cuda")

    async def run():
        streams = await start_streams(engine)
        await engine.sleep(level, mode="keep")
        taken = torch.empty(free_cuda_memory(device) - CACHE_BYTES // 2, dtype=torch.uint8, device=device)
        asleep = device_memory_in_use()
        with pytest.raises(EngineError, match=r"the core stays asleep, .*[Oo]ut of memory"):
            await engine.wake_up()
        assert await engine.is_sleeping()
        assert device_memory_in_use() <= asleep + SLACK_BYTES
        del taken
        torch.cuda.empty_cache()
        await engine.wake_up()
        return [(await rest(stream)).token_ids for stream in streams]

    expected = [output.outputs[0].token_ids for output in generate_all(engine, PROMPTS, 60)]
    assert asyncio.run(run()) == expected


def test_model_of_transformers_can_sleep(tmp_path):
    config = GPTNeoXConfig(**SIZES, architectures=["GPTNeoXForCausalLM"])
    options = {**OPTIONS, "max_model_len": 64, "kv_cache_memory_bytes": 2**24}
    prompts = random_prompts((9, 3))
    with running_engine(save_config(config, tmp_path), **options) as engine:
        expected = [output.outputs[0].token_ids for output in generate_all(engine, prompts, 16)]
        for level in (1, 2):
            asyncio.run(engine.sleep(level))
            asyncio.run(engine.wake_up())
            assert [output.outputs[0].token_ids for output in generate_all(engine, prompts, 16)] == expected
