"""Vectors of decoders: batched, chunked, from the prefix cache, preempted, and beside requests that generate."""

import asyncio
import os
import signal

import numpy as np
import pytest
import torch
from support.pooling_parity import TOLERANCE, assert_pooled, hidden_states, params_of, pooled, vector, vectors
from transformers import AutoModel, PhiConfig

from vllm_mp import EngineDeadError, EngineGenerateError, PoolingParams, SamplingParams
from vllm_mp.core.torch_threads import one_thread
from vllm_mp.testing.engines import answer, eventually, greedy, is_empty, running_engine
from vllm_mp.testing.prompts import PROMPTS
from vllm_mp.testing.random_models import (
    CONFIGS,
    PROMPT_LENGTHS,
    SIZES,
    TOKENS,
    random_prompts,
    save_random_model,
    scarce_blocks,
)

pytestmark = pytest.mark.usefixtures("forked_cores")

BATCH = [*PROMPTS[:29], "A long prompt, read in chunks. " * 15]
PHI = PhiConfig(**SIZES, **TOKENS)
"""A decoder without a native module."""
TYPES = ("last", "mean", "cls")


@pytest.fixture(scope="module")
def reference(small_model):
    return AutoModel.from_pretrained(small_model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def states(llm, reference):
    """The hidden states of each prompt of the batch."""
    tokenizer = llm.get_tokenizer()
    return [hidden_states(reference, tokenizer(prompt).input_ids) for prompt in BATCH]


@pytest.mark.essential
@pytest.mark.parametrize("concurrent", [True, False], ids=["together", "alone"])
def test_vectors_equal_those_of_transformers(llm, states, concurrent):
    # Each type has prompts of all lengths, and the two runs of this test pool each prompt with different types.
    types = [TYPES[(i + concurrent) % len(TYPES)] for i in range(len(BATCH))]
    outputs = vectors(llm, BATCH, [params_of(pooling_type) for pooling_type in types], concurrent)
    for output, expected, pooling_type in zip(outputs, states, types, strict=True):
        assert_pooled(output, expected, pooling_type)


def test_decoder_returns_the_normalized_last_state_by_default(llm, states):
    for output, expected in zip(vectors(llm, BATCH[:5], concurrent=False), states, strict=False):
        assert_pooled(output, expected, "last")
    params = params_of("mean", normalize=False, dimensions=40)
    for output, expected in zip(vectors(llm, BATCH[:5], params), states, strict=False):
        np.testing.assert_allclose(output.outputs.data, expected.mean(0)[:40].numpy(), atol=1e-4)


def test_prompt_read_in_small_chunks_gives_the_same_vector(make_small_engine, states):
    engine = make_small_engine(max_num_batched_tokens=32, max_num_seqs=16, max_num_partial_prefills=3)
    chosen = [2, 29]
    for pooling_type in TYPES:
        outputs = vectors(engine, [BATCH[i] for i in chosen], params_of(pooling_type))
        for i, output in zip(chosen, outputs, strict=True):
            assert_pooled(output, states[i], pooling_type)


@pytest.mark.parametrize("pooling_type", TYPES)
def test_only_last_token_pooling_uses_the_prefix_cache(llm, states, pooling_type):
    async def run():
        await llm.reset_prefix_cache()
        await answer(llm, BATCH[29], greedy(1))
        return await vector(llm, BATCH[29], params_of(pooling_type))

    output = asyncio.run(run())
    assert (output.num_cached_tokens > 0) == (pooling_type == "last")
    assert_pooled(output, states[29], pooling_type)


def test_generation_finds_a_pooled_prompt_in_the_prefix_cache(llm):
    async def run():
        await llm.reset_prefix_cache()
        await vector(llm, BATCH[29], params_of("mean"))
        return await answer(llm, BATCH[29], greedy(4))

    found = asyncio.run(run())
    assert found.num_cached_tokens > 0
    assert found.outputs[0].token_ids == asyncio.run(answer(llm, BATCH[29], greedy(4))).outputs[0].token_ids


@pytest.mark.parametrize("name", ["llama", "mistral-windowed", "gpt2"])
def test_pooling_requests_preempted_by_generation_give_the_same_vectors(name, tmp_path):
    prompts = random_prompts(PROMPT_LENGTHS)
    with one_thread():
        model = save_random_model(CONFIGS[name], tmp_path).base_model
        options = {**scarce_blocks(CONFIGS[name]), "max_num_seqs": 5, "skip_tokenizer_init": True}
        with running_engine(tmp_path, device="cpu", num_threads=1, **options) as engine:

            async def pool_preempted(pooling_type):
                """Return the vector of a preempted prompt, the preemptions, and the last outputs of the others."""
                await engine.reset_prefix_cache()
                before = (await engine.core_status())["num_preemptions"]
                params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0)
                streams = [engine.generate([i] * 10, params) for i in range(4)]
                await asyncio.gather(*(anext(stream) for stream in streams))
                output = await vector(engine, prompts[-1], params_of(pooling_type))
                after = (await engine.core_status())["num_preemptions"]
                ends = [[part async for part in stream][-1] for stream in streams]
                return output, after - before, ends

            for pooling_type in TYPES:
                for _ in range(10):  # on a busy machine, the streams may end before the prompt comes
                    output, count, ends = asyncio.run(pool_preempted(pooling_type))
                    assert_pooled(output, hidden_states(model, prompts[-1]), pooling_type)
                    assert all(len(end.outputs[0].token_ids) == 40 for end in ends)
                    if count > 0:
                        break
                assert count > 0
            outputs = vectors(engine, prompts, params_of("mean"))
        for prompt, output in zip(prompts, outputs, strict=True):
            assert_pooled(output, hidden_states(model, prompt), "mean")


@pytest.mark.parametrize("config", [CONFIGS["qwen2"], PHI], ids=["native", "transformers"])
def test_decoder_without_a_head_gives_vectors_and_refuses_to_generate(config, tmp_path):
    prompts = random_prompts(PROMPT_LENGTHS)
    with one_thread():
        save_random_model(config, tmp_path)
        model = AutoModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
        model.save_pretrained(tmp_path)
        options = {"skip_tokenizer_init": True, "max_num_batched_tokens": 16, "max_num_seqs": 8, "max_model_len": 128}
        with running_engine(tmp_path, device="cpu", num_threads=1, **options) as engine:
            assert asyncio.run(engine.get_supported_tasks()) == ("embed",)
            with pytest.raises(ValueError, match=r"has no head for tokens .* and generates no text; call encode\(\)"):
                asyncio.run(answer(engine, prompts[0], greedy(3)))
            outputs = vectors(engine, prompts)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert_pooled(output, hidden_states(model, prompt), "last")


def test_pooling_changes_no_answer_in_the_same_batch(llm, states):
    async def run():
        alone = [await answer(llm, prompt, greedy(8, ignore_eos=True)) for prompt in BATCH[:4]]
        together = await asyncio.gather(
            *(answer(llm, prompt, greedy(8, ignore_eos=True)) for prompt in BATCH[:4]),
            *(vector(llm, prompt, params_of("mean")) for prompt in BATCH[:8]),
        )
        return alone, together[:4], together[4:]

    alone, answers, outputs = asyncio.run(run())
    for expected, other in zip(alone, answers, strict=True):
        assert expected.outputs[0].token_ids == other.outputs[0].token_ids
    for output, expected in zip(outputs, states, strict=False):
        assert_pooled(output, expected, "mean")


def test_bfloat16_states_are_pooled_in_float32(tmp_path):
    prompt = list(range(20, 90))
    with one_thread():
        model = save_random_model(CONFIGS["llama"], tmp_path).base_model
        with running_engine(tmp_path, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=128) as engine:
            (output,) = vectors(engine, [prompt], params_of("mean"))
    assert output.outputs.data.dtype == np.float32
    assert abs(np.linalg.norm(output.outputs.data) - 1) < TOLERANCE
    assert output.outputs.data @ pooled(hidden_states(model, prompt), "mean") > 0.99


LONG = "word " * 300


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """An engine with a small model, a context of 128 tokens and scheduling by priority, and the transformers model."""
    folder = tmp_path_factory.mktemp("small")
    options = {"max_model_len": 128, "max_num_seqs": 1, "scheduling_policy": "priority"}
    with one_thread():
        model = save_random_model(CONFIGS["llama"], folder)
        model.model.embed_tokens.weight.data[13] = float("nan")
        model.save_pretrained(folder)
        with running_engine(folder, skip_tokenizer_init=True, device="cpu", num_threads=1, **options) as engine:
            yield engine, model.base_model


def test_prompt_may_fill_the_whole_context(small):
    engine, model = small
    (output,) = vectors(engine, [[5] * 128], params_of("mean"))
    assert_pooled(output, hidden_states(model, [5] * 128), "mean")
    with pytest.raises(ValueError, match="129 tokens"):
        vectors(engine, [[5] * 129])
    (output,) = vectors(engine, [[*range(20, 90)] * 2], truncate_prompt_tokens=-1)
    assert output.prompt_token_ids == [*range(20, 90), *range(20, 78)]
    with pytest.raises(ValueError, match="needs a tokenizer"):
        vectors(engine, ["text"])


def test_add_request_takes_pooling_params_and_other_calls_refuse_the_wrong_kind(llm):
    async def run():
        stream = await llm.add_request("pooled", "x", PoolingParams(pooling_type="mean"))
        (output,) = [output async for output in stream]
        return output

    output = asyncio.run(run())
    assert output.request_id == "pooled"
    assert output.outputs.data.shape == (64,)
    with pytest.raises(TypeError, match=r"call encode\(\)"):
        asyncio.run(answer(llm, "x", PoolingParams()))
    with pytest.raises(TypeError, match=r"call generate\(\)"):
        vectors(llm, ["x"], SamplingParams())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lora_request": object()}, TypeError, "lora_request must be a LoRARequest"),
        ({"trace_headers": {"traceparent": 7}}, TypeError, "trace_headers"),
        ({"priority": 3}, ValueError, "scheduling_policy='priority'"),
        ({"truncate_prompt_tokens": 0}, ValueError, "truncate_prompt_tokens"),
        ({"request_id": 7.5}, TypeError, "request_id must be a str"),
        ({"tokenization_kwargs": {"return_tensors": "np"}}, TypeError, "integers"),
    ],
)
def test_bad_argument_of_encode_is_refused_by_name(llm, options, error, message):
    with pytest.raises(error, match=message):
        vectors(llm, ["x"], **options)


def test_request_id_in_use_is_refused(small):
    engine, _ = small

    async def run():
        stream = await engine.add_request("same", [1, 2], PoolingParams())
        with pytest.raises(ValueError, match="in use"):
            await vector(engine, [1], request_id="same")
        with pytest.raises(ValueError, match="in use"):
            await answer(engine, [1], greedy(1), "same")
        (output,) = [output async for output in stream]
        return output

    assert asyncio.run(run()).request_id == "same"


@pytest.mark.parametrize("end", ["abort", "cancel", "close", "early abort"])
def test_request_that_is_left_frees_its_slot_and_blocks(llm, end):
    async def run():
        if end == "early abort":
            task = asyncio.create_task(vector(llm, LONG, request_id="left"))
            await asyncio.sleep(0)
            await llm.abort("left")
            with pytest.raises(EngineGenerateError, match="aborted"):
                await task
        elif end == "cancel":
            task = asyncio.create_task(vector(llm, LONG))
            while not llm.output_processor.num_slots_in_use:  # for some milliseconds only
                assert not task.done()
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            stream = await llm.add_request("left", LONG, PoolingParams())
            if end == "abort":
                await llm.abort(["left", "unknown"])
                with pytest.raises(EngineGenerateError, match="request left was aborted"):
                    await anext(stream)
            await stream.aclose()
        assert await llm.get_num_unfinished_requests() == 0
        await eventually(lambda: is_empty(llm))

    asyncio.run(run())


def test_requests_are_pooled_in_order_of_priority(small):
    engine, _ = small
    done = []

    async def pool(name, priority):
        await vector(engine, [1, 2, 3], params_of("mean"), name, priority=priority)
        done.append(name)

    async def run():
        os.kill(engine.cores.first.supervisor.core.process.pid, signal.SIGSTOP)
        try:
            tasks = [asyncio.create_task(pool(f"{priority}", priority)) for priority in (5, 1, 3)]

            async def all_sent():
                return engine.output_processor.num_slots_in_use == 3

            await eventually(all_sent)
        finally:
            os.kill(engine.cores.first.supervisor.core.process.pid, signal.SIGCONT)
        await asyncio.gather(*tasks)

    asyncio.run(run())
    assert done == ["1", "3", "5"]


def test_death_of_the_core_fails_pooling_requests_with_its_cause(make_engine):
    engine = make_engine(max_model_len=512, recovery=False)

    async def run():
        os.kill(engine.cores.first.supervisor.core.process.pid, signal.SIGSTOP)
        tasks = [asyncio.create_task(vector(engine, [1] * (i + 1), params_of("mean"))) for i in range(8)]

        async def all_sent():
            return engine.output_processor.num_slots_in_use == 8

        await eventually(all_sent)
        assert await engine.get_num_unfinished_requests() == 8
        os.kill(engine.cores.first.supervisor.core.process.pid, signal.SIGKILL)
        for result in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60):
            assert isinstance(result, EngineDeadError)
            assert "SIGKILL" in str(result)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await vector(engine, "x")
        assert await engine.get_num_unfinished_requests() == 0

    asyncio.run(run())


def test_vector_that_is_not_finite_fails_only_its_request(small):
    engine, model = small

    async def run():
        return await asyncio.gather(vector(engine, [1, 13, 2]), vector(engine, [1, 2, 3]), return_exceptions=True)

    bad, good = asyncio.run(run())
    assert isinstance(bad, EngineGenerateError)
    assert "not finite" in str(bad)
    assert_pooled(good, hidden_states(model, [1, 2, 3]), "last")
