"""Logits processors that the operator has registered, in real engines: `logits_processors` and `extra_args`."""

import asyncio

import pytest

from vllm_mp import EngineGenerateError, EngineStartError, SamplingParams
from vllm_mp.testing.engines import answer, greedy, running_engine
from vllm_mp.testing.random_models import CONFIGS, SIZES, random_prompts, save_config, scarce_blocks

pytestmark = pytest.mark.usefixtures("forked_cores")

VOCAB = SIZES["vocab_size"]
MODULE = "support.logits_processors"
PROMPTS = random_prompts((40, 5, 33, 12, 1, 20))


def running(folder, *processors, **options):
    return running_engine(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        device="cpu",
        num_threads=1,
        logits_processors=[*processors],
        **{"max_model_len": 128, **options},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_config(CONFIGS["llama"], tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(folder):
    names = (f"count={MODULE}:CountUp", f"{MODULE}:Target", f"{MODULE}:Faulty")
    with running(folder, *names, **scarce_blocks(CONFIGS["llama"]), async_scheduling=True) as engine:
        yield engine


async def tokens_of(engine, prompt, params):
    return [completion.token_ids for completion in (await answer(engine, prompt, params)).outputs]


def counted(prompt, count, step=0):
    return [(prompt[-1] + i + step) % VOCAB for i in range(count)]


def counting(max_tokens, step=0, **params):
    return greedy(max_tokens, ignore_eos=True, logits_processors=["count"], extra_args={"step": step}, **params)


def test_named_processors_see_all_tokens_through_chunks_and_preemption(engine):
    async def run():
        others = [tokens_of(engine, prompt, greedy(30, ignore_eos=True)) for prompt in PROMPTS]
        return await asyncio.gather(*(tokens_of(engine, prompt, counting(40, 3)) for prompt in PROMPTS), *others)

    results = asyncio.run(run())
    assert results[: len(PROMPTS)] == [[counted(prompt, 40, 3)] for prompt in PROMPTS]
    alone = [asyncio.run(tokens_of(engine, prompt, greedy(30, ignore_eos=True))) for prompt in PROMPTS]
    assert results[len(PROMPTS) :] == alone


def test_arguments_reach_processors_of_all_requests_and_each_completion(engine):
    params = SamplingParams(n=3, max_tokens=5, ignore_eos=True, extra_args={"target": 7})
    assert asyncio.run(tokens_of(engine, PROMPTS[0], params)) == [[7] * 5] * 3


@pytest.mark.parametrize("fault", ["raise", "nan", "shape"])
def test_fault_of_a_processor_fails_its_request_and_no_other(engine, fault):
    async def run():
        other = asyncio.create_task(tokens_of(engine, PROMPTS[0], counting(40)))
        same = asyncio.create_task(tokens_of(engine, PROMPTS[1], greedy(40, ignore_eos=True)))
        with pytest.raises(EngineGenerateError, match="logits processor 'Faulty'"):
            await answer(engine, PROMPTS[2], greedy(5, extra_args={"fault": fault}))
        return await other, await same

    incarnation = asyncio.run(engine.core_status())["incarnation"]
    other, same = asyncio.run(run())
    assert other == [counted(PROMPTS[0], 40)]
    assert same == asyncio.run(tokens_of(engine, PROMPTS[1], greedy(40, ignore_eos=True)))
    assert asyncio.run(engine.core_status())["incarnation"] == incarnation


def test_request_for_unknown_processors_or_with_wrong_arguments_is_refused(engine):
    for params, kind, why in (
        ({"logits_processors": ["other"]}, ValueError, "names 'other', and this engine has registered count, Target"),
        ({"extra_args": {"target": "x"}}, EngineGenerateError, "refuses the request: target must be a token id"),
    ):
        with pytest.raises(kind, match=why):
            asyncio.run(tokens_of(engine, [1], greedy(1, **params)))


def test_processors_continue_token_by_token_after_the_death_of_the_core(folder):
    with running(folder, f"count={MODULE}:CountUp", fault_injection="exit@step=9,incarnation=1") as engine:

        async def run():
            streams = (tokens_of(engine, prompt, counting(30, step)) for step, prompt in enumerate(PROMPTS))
            return await asyncio.gather(*streams)

        assert asyncio.run(run()) == [[counted(prompt, 30, step)] for step, prompt in enumerate(PROMPTS)]
        assert asyncio.run(engine.core_status())["incarnation"] == 2


@pytest.mark.slow
def test_processor_that_blocks_is_a_hang_and_its_request_fails_alone(folder):
    with running(folder, f"{MODULE}:Faulty", engine_iteration_timeout_s=3.0) as engine:

        async def run():
            other = asyncio.create_task(tokens_of(engine, PROMPTS[0], greedy(30, ignore_eos=True)))
            with pytest.raises(EngineGenerateError, match="no progress"):
                await answer(engine, PROMPTS[1], greedy(3, extra_args={"fault": "block"}))
            return await other

        assert len(asyncio.run(run())[0]) == 30


def test_core_that_cannot_load_a_processor_does_not_start_and_says_why(folder):
    why = r"support\.logits_processors:Broken cannot be constructed.*no table"
    with pytest.raises(EngineStartError, match=why), running(folder, f"{MODULE}:Broken"):
        pass
