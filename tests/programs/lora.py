import asyncio
import sys

from vllm_mp.engine.arg_utils import AsyncEngineArgs
from vllm_mp.engine.async_llm_engine import AsyncLLMEngine
from vllm_mp.lora.request import LoRARequest
from vllm_mp.sampling_params import SamplingParams


async def generate(engine, request_id, lora_request=None):
    sampling_params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    async for output in engine.generate("Once upon a time", sampling_params, request_id, lora_request=lora_request):
        final_output = output
    return final_output.outputs[0].text


async def main():
    model, *adapters = sys.argv[1:]
    engine_args = AsyncEngineArgs(
        model=model, enable_lora=True, max_loras=2, max_lora_rank=16, max_model_len=256, dtype="float32"
    )
    engine = AsyncLLMEngine.from_engine_args(engine_args)
    requests = [LoRARequest(f"adapter-{i}", i, path) for i, path in enumerate(adapters, 1)]
    for lora_request in requests:
        await engine.add_lora(lora_request)

    alone = [await generate(engine, f"alone-{i}", each) for i, each in enumerate([None, *requests])]
    mixed = await asyncio.gather(*[generate(engine, f"mixed-{i}", each) for i, each in enumerate([None, *requests])])
    print(f"different texts: {len(set(alone))}")
    print(f"same texts in one batch: {mixed == alone}")

    await engine.remove_lora(1)
    print(f"adapters: {await engine.list_loras()}")
    engine.shutdown()


asyncio.run(main())
