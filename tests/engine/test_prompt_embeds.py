"""Prompts as embeddings give what the same prompts give as token ids, however they are computed."""

import asyncio

import pytest
import torch

from vllm_mp import SamplingParams
from vllm_mp.testing.engines import answer, eventually, greedy, is_empty, running_engine
from vllm_mp.testing.greedy_parity import num_preemptions
from vllm_mp.testing.random_models import (
    CONFIGS,
    PROMPT_LENGTHS,
    random_prompts,
    save_random_model,
    scarce_blocks,
)

pytestmark = pytest.mark.usefixtures("one_torch_thread")


PROMPTS = random_prompts(PROMPT_LENGTHS)


def running(folder, **options):
    return running_engine(
        folder, skip_tokenizer_init=True, device="cpu", num_threads=1, enable_prompt_embeds=True, **options
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a random model, and its table of embeddings."""
    folder = tmp_path_factory.mktemp("llama")
    return folder, save_random_model(CONFIGS["llama"], folder).get_input_embeddings().weight.detach()


@pytest.fixture(scope="module")
def engine(folder):
    """An engine with few blocks and small chunks, that takes embeddings; and the model's table of embeddings."""
    path, table = folder
    with running(path, **scarce_blocks(CONFIGS["llama"])) as engine:
        yield engine, table


def as_embeds(table, ids, **fields):
    return {"prompt_embeds": table[torch.tensor(ids)], **fields}


async def answers(engine, prompts, params):
    outputs = await asyncio.gather(*(answer(engine, prompt, params) for prompt in prompts))
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def test_embeddings_of_tokens_give_the_same_tokens_in_chunks_and_after_preemption(engine):
    llm, table = engine
    params = greedy(24, ignore_eos=True)
    expected = asyncio.run(answers(llm, PROMPTS, params))
    before = num_preemptions(llm)
    mixed = [as_embeds(table, ids) if i % 4 else ids for i, ids in enumerate(PROMPTS)]
    assert asyncio.run(answers(llm, mixed, params)) == expected
    assert num_preemptions(llm) > before
    sampled = SamplingParams(n=3, seed=4, max_tokens=8, ignore_eos=True, presence_penalty=1.0)
    several = asyncio.run(answers(llm, [PROMPTS[0], as_embeds(table, PROMPTS[0], cache_salt="x")], sampled))
    assert several[0] == several[1]


def test_prefix_cache_keeps_embeddings_apart_from_tokens_and_from_other_embeddings(engine):
    llm, table = engine
    ids, zeros = PROMPTS[-1][:90], [0] * 90
    params = greedy(2, ignore_eos=True)

    async def num_cached(prompt):
        return (await answer(llm, prompt, params)).num_cached_tokens

    async def run():
        await llm.reset_prefix_cache()
        assert [await num_cached(ids), await num_cached(ids)] == [0, 88]
        assert await num_cached(zeros) == 0, "the ids that stand for embeddings"
        embeds = as_embeds(table, ids)
        assert [await num_cached(embeds), await num_cached(embeds)] == [0, 88]
        embeds["prompt_embeds"][50] += 1
        assert await num_cached(embeds) == 48
        assert await num_cached({"prompt_embeds": embeds["prompt_embeds"].half()}) == 0
        assert await num_cached({**embeds, "cache_salt": "other"}) == 0

    asyncio.run(run())


def test_output_repeats_the_text_of_the_prompt_and_zeros_for_its_tokens(engine):
    llm, table = engine
    output = asyncio.run(answer(llm, as_embeds(table, [5, 6, 7], prompt="said"), greedy(3, logprobs=1)))
    assert (output.prompt, output.prompt_token_ids) == ("said", [0, 0, 0])
    assert len(output.outputs[0].logprobs) == len(output.outputs[0].token_ids)


def test_repetition_penalty_knows_no_tokens_of_embeddings(engine):
    llm, table = engine
    outputs = asyncio.run(
        answers(llm, [as_embeds(table, [0] * 9), as_embeds(table, [0] * 9)], greedy(1, repetition_penalty=1e6))
    )
    plain = asyncio.run(answers(llm, [[0] * 9], greedy(1)))
    assert outputs == plain * 2


def test_refused_embeddings_send_nothing_and_disturb_no_other_request(engine):
    llm, table = engine

    async def run():
        stream = llm.generate(PROMPTS[0], SamplingParams(max_tokens=80, ignore_eos=True))
        await anext(stream)
        bad = as_embeds(table, [1, 2])
        bad["prompt_embeds"][0, 0] = float("nan")
        with pytest.raises(ValueError, match="finite"):
            await answer(llm, bad, greedy(1))
        with pytest.raises(ValueError, match=r"too long: 200 tokens.*max_model_len=128"):
            await answer(llm, as_embeds(table, [1] * 200), greedy(1))
        with pytest.raises(ValueError, match=r"call generate\(\)"):
            async for _ in llm.encode(as_embeds(table, [1])):
                pass
        await anext(stream)
        # An abort in the middle of a prompt gives everything back.
        await stream.aclose()
        await llm.add_request("given up", as_embeds(table, [1] * 120), greedy(1))
        await llm.abort("given up")
        await eventually(lambda: is_empty(llm))

    asyncio.run(run())


def test_stream_of_embeddings_continues_token_by_token_after_the_death_of_the_core(folder, engine):
    path, table = folder
    prompts = [as_embeds(table, ids) if i % 2 else ids for i, ids in enumerate(PROMPTS[:4])]
    params = SamplingParams(seed=3, max_tokens=20, ignore_eos=True)
    expected = asyncio.run(answers(engine[0], prompts, params))
    with running(path, max_model_len=128, fault_injection="exit@step=9,incarnation=1") as llm:
        assert asyncio.run(answers(llm, prompts, params)) == expected
        assert asyncio.run(llm.core_status())["incarnation"] == 2
