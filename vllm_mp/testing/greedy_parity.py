"""Check that an engine's output is the greedy one of transformers, by one forward pass over prompt and output.

Each token must be the most likely token after the tokens before it, as in transformers' greedy `generate`. Another
token is accepted only if its logit is within a near-tie of the highest.
"""

import asyncio

import torch

from vllm_mp import AsyncLLM, RequestOutput
from vllm_mp.testing.engines import answer, greedy

NEAR_TIE = 1e-4
"""The greatest difference of two logits whose order rounding may change."""


class GreedyReference:
    """A transformers model that runs once per prompt and output, even if the same output is checked again."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._known: dict[tuple[int, ...], tuple[list[int], torch.Tensor]] = {}

    @torch.inference_mode()
    def behind(self, prompt: list[int], output_ids: list[int]) -> torch.Tensor:
        """Return how far each output token's logit is below the highest one at its position, [num_output_tokens]."""
        known = self._known.get(tuple(prompt))
        if known is None or known[0][: len(output_ids)] != output_ids:
            logits = self._model(torch.tensor([prompt + output_ids])).logits[0, len(prompt) - 1 : -1]
            behind = logits.max(dim=-1).values - logits.gather(-1, torch.tensor(output_ids)[:, None])[:, 0]
            known = self._known[tuple(prompt)] = output_ids, behind
        return known[1][: len(output_ids)]


def assert_greedy(reference: GreedyReference, output: RequestOutput, near_tie: float = NEAR_TIE) -> None:
    """Raise AssertionError unless each token of `output` is transformers' choice after the tokens before it."""
    prompt, output_ids = output.prompt_token_ids, output.outputs[0].token_ids
    behind = reference.behind(prompt, output_ids)
    worst = int(behind.argmax())
    assert behind[worst] <= near_tie, (
        f"output token {worst} for {output.prompt or prompt!r} is {behind[worst]:.2e} below the highest logit"
    )


def generate_all(
    engine: AsyncLLM, prompts: list[str] | list[list[int]], num_tokens: int, concurrent: bool = True
) -> list[RequestOutput]:
    """Return the final output of each prompt, `num_tokens` long. Run requests one after another unless `concurrent`."""
    params = greedy(num_tokens, ignore_eos=True)

    async def run() -> list[RequestOutput]:
        await engine.reset_prefix_cache()  # so that each prompt is computed rather than found in the prefix cache
        if concurrent:
            return await asyncio.gather(*(answer(engine, prompt, params) for prompt in prompts))
        return [await answer(engine, prompt, params) for prompt in prompts]

    outputs = asyncio.run(run())
    assert [len(output.outputs[0].token_ids) for output in outputs] == [num_tokens] * len(prompts)
    return outputs


def assert_engine_is_greedy(
    engine: AsyncLLM,
    model: torch.nn.Module,
    prompts: list[str] | list[list[int]],
    num_tokens: int,
    near_tie: float = NEAR_TIE,
) -> None:
    """Raise AssertionError unless every output is transformers' choice, for the prompts batched and one at a time."""
    reference = GreedyReference(model)
    for concurrent in (True, False):
        for output in generate_all(engine, prompts, num_tokens, concurrent):
            assert_greedy(reference, output, near_tie)


def num_preemptions(engine: AsyncLLM) -> int:
    """Return the number of preemptions that the core reports."""

    async def run() -> int:
        return int((await engine.core_status())["num_preemptions"])

    return asyncio.run(run())
