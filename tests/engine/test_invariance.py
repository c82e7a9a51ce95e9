"""An answer in bfloat16 is batch-invariant: the same alone, in a batch, read in chunks, and from the prefix cache."""

import asyncio

import pytest

from vllm_mp import SamplingParams
from vllm_mp.kernels.cpu.library import library
from vllm_mp.testing.engines import answer
from vllm_mp.testing.prompts import PROMPTS

MANY = PROMPTS[::2]


def content(output):
    """Return the tokens with their log-probabilities, and the text."""
    completion = output.outputs[0]
    positions = zip(completion.token_ids, completion.logprobs, strict=True)
    return [(token, logprobs[token].logprob) for token, logprobs in positions], completion.text


@pytest.mark.usefixtures("forked_cores")
@pytest.mark.skipif(library() is None, reason="operations of torch are not batch-invariant")
@pytest.mark.parametrize(
    ("model", "quantization", "num_tokens"),
    [
        pytest.param("small_model", None, 24, marks=pytest.mark.essential),
        ("default_model", None, 8),
        pytest.param("default_model", "int8", 24, marks=pytest.mark.slow),
    ],
)
def test_answer_is_batch_invariant(make_engine, request, model, quantization, num_tokens):
    options = {"model": str(request.getfixturevalue(model)), "dtype": "bfloat16", "quantization": quantization}
    whole = make_engine(**options)
    chunked = make_engine(**options, max_num_batched_tokens=24, max_num_seqs=16)

    def params(i):
        return SamplingParams(temperature=i % 2, seed=i, max_tokens=num_tokens, ignore_eos=True, logprobs=0)

    async def together(engine):
        return await asyncio.gather(*(answer(engine, prompt, params(i)) for i, prompt in enumerate(MANY)))

    async def run():
        expected = [content(output) for output in await together(whole)]
        assert [content(output) for output in await together(chunked)] == expected
        assert [content(output) for output in await together(whole)] == expected  # much of it is in the prefix cache
        for i in range(0, len(MANY), 5):
            assert content(await answer(chunked, MANY[i], params(i))) == expected[i]

    asyncio.run(run())
