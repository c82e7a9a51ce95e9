"""An engine that sleeps on the GPU leaves its memory to others, and is the same engine when it wakes up."""

import asyncio

import pytest
import torch
from support.gpu_device import DEVICE, ON_DEVICE, device_memory_in_use
from transformers import GPTNeoXConfig, LlamaConfig

from vllm_mp import EngineError, SamplingParams
from vllm_mp.core.worker.memory import free_cuda_memory
from vllm_mp.testing.engines import eventually, is_empty, rest, running_engine
from vllm_mp.testing.greedy_parity import generate_all
from vllm_mp.testing.random_models import SIZES, random_prompts, save_config

pytestmark = ON_DEVICE

# Weights and cache are large enough to stand out.
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
CACHE_BYTES = 2**29
OPTIONS = {
    "device": DEVICE,
    "num_threads": 1,
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "max_model_len": 2048,
    "kv_cache_memory_bytes": CACHE_BYTES,
}
SLACK = 64 * 2**20
"""Bytes by which two readings of the same state may differ."""
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
def test_the_memory_comes_back_to_others_and_the_answers_are_those_of_before(engine, level):
    # On a CPU level 1 keeps the weights, and what nobody has written of a cache takes no memory.
    given_up = WEIGHT_BYTES * (level - 1) if DEVICE == "cpu" else WEIGHT_BYTES + CACHE_BYTES

    async def run():
        streams = await start_streams(engine)
        held = device_memory_in_use()
        await engine.sleep(level)
        assert device_memory_in_use() <= held - given_up + SLACK
        await engine.wake_up()
        answers = [(await rest(stream)).token_ids for stream in streams]
        assert device_memory_in_use() <= held + SLACK
        await eventually(lambda: is_empty(engine))
        return answers

    expected = [output.outputs[0].token_ids for output in generate_all(engine, PROMPTS, 60)]
    assert asyncio.run(run()) == expected
    assert [output.outputs[0].token_ids for output in generate_all(engine, PROMPTS, 60)] == expected


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_finds_its_memory_taken_sleeps_on_without_any(engine, level):
    if DEVICE == "cpu":
        pytest.skip("a test that takes the memory of the host is none")
    device = torch.device("cuda")

    async def run():
        streams = await start_streams(engine)
        await engine.sleep(level)
        taken = torch.empty(free_cuda_memory(device) - CACHE_BYTES // 2, dtype=torch.uint8, device=device)
        asleep = device_memory_in_use()
        with pytest.raises(EngineError, match=r"the core stays asleep, .*[Oo]ut of memory"):
            await engine.wake_up()
        assert await engine.is_sleeping()
        assert device_memory_in_use() <= asleep + SLACK
        del taken
        torch.cuda.empty_cache()
        await engine.wake_up()
        return [(await rest(stream)).token_ids for stream in streams]

    expected = [output.outputs[0].token_ids for output in generate_all(engine, PROMPTS, 60)]
    assert asyncio.run(run()) == expected


def test_a_model_of_transformers_sleeps_too(tmp_path):
    config = GPTNeoXConfig(**SIZES, architectures=["GPTNeoXForCausalLM"])
    options = {**OPTIONS, "max_model_len": 64, "kv_cache_memory_bytes": 2**24}
    prompts = random_prompts((9, 3))
    with running_engine(save_config(config, tmp_path), **options) as engine:
        expected = [output.outputs[0].token_ids for output in generate_all(engine, prompts, 16)]
        for level in (1, 2):
            asyncio.run(engine.sleep(level))
            asyncio.run(engine.wake_up())
            assert [output.outputs[0].token_ids for output in generate_all(engine, prompts, 16)] == expected
