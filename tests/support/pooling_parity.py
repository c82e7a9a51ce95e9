"""Reference vectors as published pipelines compute them: transformers' hidden states, pooled and normalized here."""

import asyncio

import numpy as np
import torch

from vllm_mp import PoolingParams

TOLERANCE = 1e-5


async def vector(engine, prompt, params=None, request_id=None, **options):
    """Return the only output of `encode`."""
    outputs = [output async for output in engine.encode(prompt, params, request_id, **options)]
    assert len(outputs) == 1
    return outputs[0]


def vectors(engine, prompts, params=None, concurrent=True, **options):
    """Return the output for each prompt, one after another unless `concurrent`. `params` may be a list."""
    each = params if isinstance(params, list) else [params] * len(prompts)
    pairs = list(zip(prompts, each, strict=True))

    async def run():
        await engine.reset_prefix_cache()
        if concurrent:
            return await asyncio.gather(*(vector(engine, *pair, **options) for pair in pairs))
        return [await vector(engine, *pair, **options) for pair in pairs]

    return asyncio.run(run())


@torch.inference_mode()
def hidden_states(model, prompt_token_ids):
    """Return the last, normalized hidden states of a model without a head: float32 [num_tokens, hidden_size]."""
    return model(torch.tensor([prompt_token_ids])).last_hidden_state[0]


def pooled(states, pooling_type, normalize=True, dimensions=None):
    """Return the vector of `states` [num_tokens, hidden_size] by the published definition of `pooling_type`."""
    chosen = {"last": states[-1], "mean": states.mean(0), "cls": states[0]}[pooling_type][:dimensions]
    return (torch.nn.functional.normalize(chosen, dim=0) if normalize else chosen).numpy()


def assert_pooled(output, states, pooling_type, **options):
    """Raise AssertionError unless `output` is the reference vector."""
    np.testing.assert_allclose(output.outputs.data, pooled(states, pooling_type, **options), atol=TOLERANCE, rtol=0)


def params_of(pooling_type, **fields):
    return PoolingParams(pooling_type=pooling_type, **fields)
