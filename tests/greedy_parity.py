"""Whether an answer is transformers' own greedy one, checked in one forward pass over prompt and answer.

Each token must be the likeliest after those before it, which is what `generate` takes. A token may differ only in a
near-tie of two logits.
"""

import asyncio

import torch
from harness import answer, greedy

NEAR_TIE = 1e-4


@torch.inference_mode()
def assert_greedy(model, output, near_tie=NEAR_TIE):
    """Each token of `output` is transformers' choice after the tokens before it."""
    prompt, answer_ids = output.prompt_token_ids, output.outputs[0].token_ids
    logits = model(torch.tensor([prompt + answer_ids])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(-1, torch.tensor(answer_ids)[:, None])[:, 0]
    behind = logits.max(dim=-1).values - chosen
    worst = int(behind.argmax())
    assert behind[worst] <= near_tie, (
        f"token {worst} of the answer to {output.prompt or prompt!r} is {behind[worst]:.2e} behind the likeliest"
    )


def generate_all(engine, prompts, num_tokens, concurrent=True):
    """The final output of each prompt, `num_tokens` long; one after the other unless `concurrent`."""
    params = greedy(num_tokens, ignore_eos=True)

    async def run():
        await engine.reset_prefix_cache()  # each prompt is read, not found
        if concurrent:
            return await asyncio.gather(*(answer(engine, prompt, params) for prompt in prompts))
        return [await answer(engine, prompt, params) for prompt in prompts]

    outputs = asyncio.run(run())
    assert [len(output.outputs[0].token_ids) for output in outputs] == [num_tokens] * len(prompts)
    return outputs


def assert_engine_is_greedy(engine, model, prompts, num_tokens, near_tie=NEAR_TIE):
    """Every answer is transformers' choice, with the prompts batched together and then alone."""
    for concurrent in (True, False):
        for output in generate_all(engine, prompts, num_tokens, concurrent):
            assert_greedy(model, output, near_tie)


def num_preemptions(engine):
    """How often the core has preempted, by its own count."""

    async def run():
        return (await engine.core_status())["num_preemptions"]

    return asyncio.run(run())
