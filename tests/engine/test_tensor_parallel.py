"""An engine whose core has several ranks, each a process, beside an engine with one process."""

import asyncio
from pathlib import Path

import pytest
from support.lora_engines import PROMPT, save_adapters

from vllm_mp import AsyncEngineArgs, EngineError, PoolingParams, SamplingParams
from vllm_mp.core.torch_threads import one_thread
from vllm_mp.requests.sampling_params import StructuredOutputsParams
from vllm_mp.testing.engines import answer, greedy, running_engine
from vllm_mp.testing.greedy_parity import assert_engine_is_greedy, num_preemptions
from vllm_mp.testing.machines import running_on_two_machines
from vllm_mp.testing.random_models import (
    CONFIGS,
    PROMPT_LENGTHS,
    few_blocks,
    random_prompts,
    save_random_model,
)

pytestmark = pytest.mark.usefixtures("forked_ranks")

RANKS = {
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "both": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
OPTIONS = {"num_threads": 1, "max_model_len": 256, "recovery": False, "check_invariants": True}
LORA = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 4}


@pytest.fixture(scope="module")
def adapters(small_model, tmp_path_factory):
    return save_adapters(small_model, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def one_process(small_model):
    with running_engine(small_model, **OPTIONS, **LORA) as engine:
        yield engine


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("tensor", 1), marks=pytest.mark.essential),
        ("pipeline", 1),
        ("tensor", 2),
        slow(("both", 1)),
        slow(("both", 2)),
        slow(("pipeline", 2)),
    ],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def engines(request, one_process, small_model, tmp_path_factory):
    """An engine with one process, and an engine with several ranks on one or two machines."""
    ranks, num_machines = request.param
    options = {**OPTIONS, **LORA, **RANKS[ranks]}
    if num_machines == 1:
        with running_engine(small_model, **options) as shared:
            yield one_process, shared
    else:
        with running_on_two_machines(small_model, tmp_path_factory.mktemp("keys"), **options) as (shared, _):
            yield one_process, shared


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


def test_constrained_completions_are_those_of_one_process(engines):
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


def test_vectors_are_those_of_one_process(engines):
    async def ask(engine):
        params = [PoolingParams(task="embed", pooling_type=kind) for kind in ("mean", "last")]
        streams = [engine.encode(f"{PROMPT} " * 30, own, f"vector-{n}") for n, own in enumerate(params)]
        return [[output async for output in stream][-1].outputs.data for stream in streams]

    whole, shared = of_both(engines, ask)
    for found, expected in zip(shared, whole, strict=True):
        assert list(found) == pytest.approx(list(expected), abs=1e-3)


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
            await engine.sleep(level, mode="keep")
            await engine.wake_up()
            assert (await answer(engine, PROMPT, greedy(10))).outputs[0].token_ids == expected
        await engine.reset_prefix_cache()
        counts = await engine.collective_rpc("get_num_parameters")
        assert len(set(counts)) == 1
        assert len(await engine.collective_rpc("get_memory_info")) == len(counts) == len(pids) > 1
        with pytest.raises(EngineError, match="num_tokens must be"):
            await engine.collective_rpc("get_kv_cache_bytes", args=(-1,))
        await engine.start_profile()
        await answer(engine, PROMPT, greedy(3))
        folder = await engine.stop_profile()
        return pids, folder

    pids, folder = asyncio.run(ask(shared))
    traces = [path.name for path in Path(folder).iterdir()]
    assert sorted(traces) == sorted(f"core-{pid}-0.trace.json.gz" for pid in pids)


def test_streams_are_those_of_one_process_beside_aborts_and_a_pause(engines):
    async def ask(engine):
        prompts = [f"{PROMPT} {n}" * (1 + n % 7) for n in range(24)]
        params = [SamplingParams(temperature=0.7, seed=n, max_tokens=4 + n, ignore_eos=True) for n in range(24)]
        asked = [
            asyncio.ensure_future(answer(engine, prompt, own)) for prompt, own in zip(prompts, params, strict=True)
        ]
        aborted = [engine.generate(prompt, greedy(100, ignore_eos=True), f"aborted-{prompt}") for prompt in prompts[:8]]
        await asyncio.gather(*(anext(stream) for stream in aborted))
        await asyncio.gather(*(stream.aclose() for stream in aborted))
        await engine.pause_generation("keep")
        await engine.resume_generation()
        return [output.outputs[0].token_ids for output in await asyncio.gather(*asked)]

    whole, shared = of_both(engines, ask)
    assert shared == whole


def test_number_of_ranks_that_the_model_does_not_allow_is_refused_at_once(small_model):
    with pytest.raises(
        ValueError, match=r"tensor_parallel_size=3: num_attention_heads=4 of .* is not a multiple of it"
    ):
        AsyncEngineArgs(str(small_model), tensor_parallel_size=3).create_engine_config()
    with pytest.raises(ValueError, match=r"pipeline_parallel_size=3: .* has 2 layers, .* set it to at most 2"):
        AsyncEngineArgs(str(small_model), pipeline_parallel_size=3).create_engine_config()
    with pytest.raises(ValueError, match=r"async_scheduling=True: with pipeline_parallel_size=2 .* leave it out"):
        AsyncEngineArgs(str(small_model), pipeline_parallel_size=2, async_scheduling=True).create_engine_config()


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
