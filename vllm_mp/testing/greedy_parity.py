"""Whether an answer is transformers' own greedy one, checked in one forward pass over prompt and answer.

Each token must be the likeliest after those before it, which is what `generate` takes. A token may differ only in a
near-tie of two logits.
"""

import asyncio

import torch

from vllm_mp.testing.engines import answer, greedy

NEAR_TIE = 1e-4


class GreedyReference:
    """Transformers' model, which reads each prompt with its answer once, however often that answer is given."""

    def __init__(self, model):
        self._model = model
        self._known = {}

    @torch.inference_mode()
    def behind(self, prompt, answer_ids):
        """How far each token of the answer is behind the likeliest after the tokens before it, in logits, [n]."""
        known, behind = self._known.get(tuple(prompt), ([], None))
        if known[: len(answer_ids)] != answer_ids:
            logits = self._model(torch.tensor([prompt + answer_ids])).logits[0, len(prompt) - 1 : -1]
            behind = logits.max(dim=-1).values - logits.gather(-1, torch.tensor(answer_ids)[:, None])[:, 0]
            self._known[tuple(prompt)] = answer_ids, behind
        return behind[: len(answer_ids)]


def assert_greedy(reference, output, near_tie=NEAR_TIE):
    """Each token of `output` is transformers' choice after the tokens before it."""
    prompt, answer_ids = output.prompt_token_ids, output.outputs[0].token_ids
    behind = reference.behind(prompt, answer_ids)
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
    reference = GreedyReference(model)
    for concurrent in (True, False):
        for output in generate_all(engine, prompts, num_tokens, concurrent):
            assert_greedy(reference, output, near_tie)


def num_preemptions(engine):
    """How often the core has preempted, by its own count."""

    async def run():
        return (await engine.core_status())["num_preemptions"]

    return asyncio.run(run())
