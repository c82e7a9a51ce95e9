"""Adapters for the small model, and the texts of requests with them."""

import asyncio

from vllm_mp import AsyncEngineArgs, LoRARequest
from vllm_mp.testing.adapters import adapter_tensors, save_adapter

ADAPTERS = 4
LORA = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 3}
"""Options of an engine with fewer slots than there are adapters."""
PROMPT = "The capital of France is"


def save_adapters(model, folder, rank=8):
    """Write adapters for `model` into `folder`, and return their requests by id; 0 stands for the base model."""
    architecture = AsyncEngineArgs(model=str(model)).create_engine_config().model_config.architecture
    requests = {0: None}
    for number in range(1, ADAPTERS + 1):
        path = save_adapter(folder / f"adapter-{number}", adapter_tensors(architecture, rank, seed=number), r=rank)
        requests[number] = LoRARequest(f"adapter-{number}", number, str(path))
    return requests


async def tokens(engine, lora, params, prompt=PROMPT):
    """Return the token ids of a request with the adapter `lora`."""
    async for output in engine.generate(prompt, params, lora_request=lora):
        last = output
    assert last.lora_request == lora
    return last.outputs[0].token_ids


async def tokens_of_all(engine, adapters, params, count):
    """Return the token ids of `count` requests at a time, whose adapters take turns."""
    return await asyncio.gather(*[tokens(engine, adapters[i % len(adapters)], params) for i in range(count)])
