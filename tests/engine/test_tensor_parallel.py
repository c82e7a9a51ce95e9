"""An engine whose core has several ranks, each a process, beside an engine with one process."""

import asyncio
from pathlib import Path

import pytest
from support.lora_engines import PROMPT, save_adapters

from vllm_mp import AsyncEngineArgs, EngineError, SamplingParams
from vllm_mp.core.torch_threads import one_thread
from vllm_mp.sampling_params import StructuredOutputsParams
from vllm_mp.testing.engines import answer, greedy, running_engine
from vllm_mp.testing.greedy_parity import assert_engine_is_greedy, num_preemptions
from vllm_mp.testing.random_models import (
    CONFIGS,
    PROMPT_LENGTHS,
    few_blocks,
    random_prompts,
    save_random_model,
)

LORA = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 4}


@pytest.fixture(scope="module")
def adapters(small_model, tmp_path_factory):
    return save_adapters(small_model, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def engines(small_model):
    """An engine with one process, and an engine with two ranks."""
    options = {"num_threads": 1, "max_model_len": 256, "recovery": False, **LORA}
    with (
        running_engine(small_model, **options) as whole,
        running_engine(small_model, **options, tensor_parallel_size=2) as shared,
    ):
        yield whole, shared


def of_both(engines, ask):
    """Return the results of the coroutine function `ask` for both engines."""
    return [asyncio.run(ask(engine)) for engine in engines]


def assert_equal(engines, params, prompt=PROMPT):
    """Raise AssertionError unless both engines give the same completions; return the last output of the second."""
    whole, shared = of_both(engines, lambda engine: answer(engine, prompt, params))
    assert [one.token_ids for one in shared.outputs] == [one.token_ids for one in whole.outputs]
    return whole, shared


def test_completions_are_those_of_one_process(engines):
    assert_equal(engines, greedy(30, ignore_eos=True))
    assert_equal(engines, SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=20, top_k=20, ignore_eos=True))
    assert_equal(engines, greedy(20, repetition_penalty=1.3, min_tokens=4, logit_bias={7: 3.0}))
    choice = StructuredOutputsParams(choice=["Paris", "London"])
    assert assert_equal(engines, greedy(20, structured_outputs=choice))[1].outputs[0].text in ("Paris", "London")


def test_log_probabilities_are_those_of_one_process(engines):
    whole, shared = assert_equal(engines, greedy(8, logprobs=3, prompt_logprobs=2, ignore_eos=True))
    for own, expected in (
        (shared.outputs[0].logprobs, whole.outputs[0].logprobs),
        (shared.prompt_logprobs[1:], whole.prompt_logprobs[1:]),
    ):
        assert len(own) == len(expected)
        for found, wanted in zip(own, expected, strict=True):
            assert {token: one.logprob for token, one in found.items()} == pytest.approx(
                {token: one.logprob for token, one in wanted.items()}, abs=1e-3
            )


def test_adapters_reach_all_ranks_and_take_turns(engines, adapters):
    async def ask(engine):
        params = greedy(12, ignore_eos=True)
        streams = [engine.generate(PROMPT, params, str(n), lora_request=adapters[n]) for n in adapters]

        async def last(stream):
            async for output in stream:
                result = output
            return result.outputs[0].token_ids

        return await asyncio.gather(*map(last, streams))

    whole, shared = of_both(engines, ask)
    assert shared == whole
    assert len({tuple(tokens) for tokens in whole}) > 2


def test_operations_reach_all_ranks(engines):
    _, shared = engines

    async def ask(engine):
        expected = (await answer(engine, PROMPT, greedy(10))).outputs[0].token_ids
        pids = (await engine.core_status())["rank_pids"]
        for level in (1, 2):
            await engine.sleep(level)
            await engine.wake_up()
            assert (await answer(engine, PROMPT, greedy(10))).outputs[0].token_ids == expected
        await engine.reset_prefix_cache()
        counts = await engine.collective_rpc("get_num_parameters")
        assert counts[0] == counts[1] > 0
        assert len(await engine.collective_rpc("get_memory_info")) == 2
        with pytest.raises(EngineError, match="num_tokens must be"):
            await engine.collective_rpc("get_kv_cache_bytes", args=(-1,))
        await engine.start_profile()
        await answer(engine, PROMPT, greedy(3))
        folder = await engine.stop_profile()
        return pids, folder

    pids, folder = asyncio.run(ask(shared))
    traces = [path.name for path in Path(folder).iterdir()]
    assert sorted(traces) == sorted(f"core-{pid}-0.trace.json.gz" for pid in pids)


def test_number_of_ranks_that_the_model_does_not_allow_is_refused_at_once(small_model):
    with pytest.raises(ValueError, match=r"tensor_parallel_size=3: num_attention_heads=4 of .* is no multiple of it"):
        AsyncEngineArgs(str(small_model), tensor_parallel_size=3).create_engine_config()


@pytest.mark.slow
def test_four_ranks_are_greedy_with_chunks_and_preemption(tmp_path):
    config = CONFIGS["llama"]
    config = type(config)(**{**config.to_dict(), "num_attention_heads": 4})
    with one_thread():
        model = save_random_model(config, tmp_path)
        options = few_blocks(2 * 4 * 8 * 3)  # of one rank: keys and values of one head of 8 floats in 3 layers
        with running_engine(tmp_path, skip_tokenizer_init=True, tensor_parallel_size=4, **options) as engine:
            assert_engine_is_greedy(engine, model, random_prompts(PROMPT_LENGTHS), 16)
            assert num_preemptions(engine) > 0
