"""A token whose embedding is NaN fails the requests that contain it and changes no other request."""

import asyncio

import pytest
import torch

from vllm_mp import EngineGenerateError, RequestOutputKind, SamplingParams
from vllm_mp.core.torch_threads import one_thread
from vllm_mp.testing.engines import answer, eventually, greedy, is_empty, running_engine
from vllm_mp.testing.random_models import CONFIGS, random_prompts, save_random_model, scarce_blocks

pytestmark = pytest.mark.usefixtures("forked_cores")

BAD = 13
LENGTHS = (37, 5, 22, 1, 13, 40)
PROMPTS = [[token if token != BAD else BAD + 1 for token in prompt] for prompt in random_prompts(LENGTHS)]
SHARED = PROMPTS[0]
WHOLE = {"max_model_len": 128, "block_size": 4, "kv_cache_memory_bytes": 2**22}
CHUNKED = {**WHOLE, "max_num_batched_tokens": 16}
OVERLAPPING = {**WHOLE, "async_scheduling": True}


@pytest.fixture(scope="module", params=["llama", "mistral-windowed", "gpt2-scaled"])
def poisoned(request, tmp_path_factory):
    """A model in which the embedding of `BAD` is NaN: its configuration and its folder."""
    config, path = CONFIGS[request.param], tmp_path_factory.mktemp(request.param)
    with one_thread():
        model = save_random_model(config, path)  # the head does not share the matrix of the embedding
        with torch.no_grad():
            model.get_input_embeddings().weight[BAD] = torch.nan
        model.save_pretrained(path)
    return config, path


def running(folder, **options):
    return running_engine(folder, skip_tokenizer_init=True, device="cpu", num_threads=1, **options)


async def ask(engine, tokens, **params):
    """Return the tokens of an answer without the bad token, and how many prompt tokens the prefix cache held."""
    params = greedy(6, ignore_eos=True, logit_bias={BAD: -100}, **params)
    output = await answer(engine, {"prompt_token_ids": tokens}, params)
    return output.outputs[0].token_ids, output.num_cached_tokens


async def expect_failure(engine, tokens, **params):
    """Check that a request fails because its logits are not finite."""
    kind = RequestOutputKind.FINAL_ONLY
    with pytest.raises(EngineGenerateError, match="not finite"):
        await answer(engine, {"prompt_token_ids": tokens}, SamplingParams(max_tokens=6, output_kind=kind, **params))


@pytest.fixture(scope="module", params=[WHOLE, CHUNKED, OVERLAPPING], ids=["whole", "chunked", "overlapping"])
def engine(request, poisoned):
    """An engine of the poisoned model."""
    with running(poisoned[1], **request.param, max_logprobs=-1) as engine:
        yield engine


def test_prefix_shared_with_a_bad_request_stays_valid(engine):
    async def run(engine):
        expected, _ = await ask(engine, [*SHARED, 5])
        await engine.reset_prefix_cache()
        await expect_failure(engine, [*SHARED, BAD, 6, 7])
        after, num_cached_tokens = await ask(engine, [*SHARED, 5])
        assert num_cached_tokens == 36
        assert after == expected
        await engine.reset_prefix_cache()
        _, *together = await asyncio.gather(
            expect_failure(engine, [*SHARED, BAD, 6, 7]), *(ask(engine, [*SHARED, 5]) for _ in range(3))
        )
        assert [tokens for tokens, _ in together] == [expected] * 3
        await eventually(lambda: is_empty(engine))

    asyncio.run(run(engine))


def test_blocks_with_values_that_are_not_finite_can_be_used_again(poisoned):
    async def run(engine):
        expected = [await ask(engine, prompt) for prompt in PROMPTS]
        await engine.reset_prefix_cache()
        await asyncio.gather(*(expect_failure(engine, [BAD] * 100) for _ in range(3)))
        again = await asyncio.gather(*(ask(engine, prompt) for prompt in PROMPTS))
        assert [tokens for tokens, _ in again] == [tokens for tokens, _ in expected]

    config, folder = poisoned
    with running(folder, **scarce_blocks(config)) as engine:
        asyncio.run(run(engine))


def test_bad_request_fails_alone_with_any_parameters(engine):
    requested = [
        {"temperature": 0},
        {"temperature": 1, "seed": 1},
        {"logprobs": 3},
        {"logprobs": -1},
        {"prompt_logprobs": 2},
        {"n": 3, "temperature": 1},
        {"top_k": 5},
        {"top_p": 0.5},
        {"min_p": 0.1},
        {"top_k": 5, "top_p": 0.5, "min_p": 0.01, "logprobs": 1},
        {"presence_penalty": 1, "frequency_penalty": 1, "repetition_penalty": 1.5},
        {"logit_bias": {3: 5.0}},
        {"min_tokens": 3},
    ]

    async def run(engine):
        expected = [await ask(engine, prompt) for prompt in PROMPTS]
        results = await asyncio.gather(
            *(ask(engine, prompt, logprobs=2) for prompt in PROMPTS),
            *(expect_failure(engine, [4, BAD, 6, token], **fields) for token, fields in enumerate(requested)),
        )
        assert [tokens for tokens, _ in results[: len(PROMPTS)]] == [tokens for tokens, _ in expected]
        await eventually(lambda: is_empty(engine))
        assert (await engine.core_status())["restarts"] == 0, "no step computed an invalid token"

    asyncio.run(run(engine))
