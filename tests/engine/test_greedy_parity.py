"""Greedy answers equal those of transformers, token for token, with any batching, chunks and preemption."""

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_mp.machine.cpu_info import KERNELS_VARIABLE, runnable_builds
from vllm_mp.testing.engines import ENGINE, answer, greedy
from vllm_mp.testing.greedy_parity import GreedyReference, assert_greedy, generate_all, num_preemptions
from vllm_mp.testing.prompts import PROMPTS

pytestmark = pytest.mark.usefixtures("forked_cores")

FEW_TOKENS = 12
"""Length of the answers in tests that need no preemption."""


@pytest.fixture(scope="module")
def model(default_model):
    return AutoModelForCausalLM.from_pretrained(default_model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def reference(model):
    return GreedyReference(model)


@pytest.fixture(scope="module")
def tokenizer(default_model):
    return AutoTokenizer.from_pretrained(default_model)


def test_answers_are_greedy_with_all_prompts_in_one_batch(real_llm, reference):
    for output in generate_all(real_llm, PROMPTS, FEW_TOKENS):
        assert_greedy(reference, output)


@pytest.mark.parametrize(
    "kernels", [*(pytest.param(build, marks=pytest.mark.slow) for build in runnable_builds()), "none"]
)
def test_answers_are_greedy_with_each_build_of_the_kernels(make_engine, reference, monkeypatch, kernels):
    monkeypatch.setenv(KERNELS_VARIABLE, kernels)
    for output in generate_all(make_engine(), PROMPTS[::6], FEW_TOKENS):
        assert_greedy(reference, output)


def test_answers_are_greedy_with_chunks_and_preemption(make_engine, reference):
    # Enough blocks for all prompts, and for half of the tokens of the answers.
    prompts = PROMPTS[::2]
    block_bytes = 16 * 30 * 2 * 3 * 64 * 4
    engine = make_engine(
        max_model_len=512,
        kv_cache_memory_bytes=50 * block_bytes,
        max_num_batched_tokens=24,
        max_num_seqs=16,
        max_prefill_slowdown=0,  # so that preemptions do not depend on the times of steps
    )
    outputs = generate_all(engine, prompts, 32)
    assert num_preemptions(engine) > 0
    for output in outputs:
        assert_greedy(reference, output)


def test_text_and_end_equal_those_of_generate_in_transformers(real_llm, model, tokenizer):
    prompts = PROMPTS[0:1] + PROMPTS[28:30]

    async def run():
        return await asyncio.gather(*(answer(real_llm, prompt, greedy(32)) for prompt in prompts))

    for prompt, output in zip(prompts, asyncio.run(run()), strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        assert output.prompt_token_ids == ids[0].tolist()
        expected = model.generate(ids, max_new_tokens=32, do_sample=False)[0, ids.shape[1] :].tolist()
        completion = output.outputs[0]
        assert completion.token_ids == expected
        assert completion.text == tokenizer.decode(expected, skip_special_tokens=True)
        ended = expected[-1] in model.generation_config.eos_token_id
        assert completion.finish_reason == ("stop" if ended else "length")


def test_engine_reads_the_same_configuration_as_transformers(real_llm, model):
    assert real_llm.model_config.dtype == ENGINE["dtype"]
    assert real_llm.model_config.get_vocab_size() == model.config.vocab_size
    assert real_llm.model_config.eos_token_ids == model.generation_config.eos_token_id == [2, 0]
