import asyncio
import sys

from vllm_mp.engine.arg_utils import AsyncEngineArgs
from vllm_mp.pooling_params import PoolingParams
from vllm_mp.utils import random_uuid
from vllm_mp.utils.async_utils import merge_async_iterators
from vllm_mp.v1.engine.async_llm import AsyncLLM


async def main():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=sys.argv[1], max_model_len=512))
    texts = ["The capital of France is Paris.", "Paris is the capital of France.", "Wash the rice twice."]
    requests = [engine.encode(text, PoolingParams(), random_uuid()) for text in texts]

    vectors = {}
    async for i, output in merge_async_iterators(*requests):
        vectors[i] = output.outputs.data
    for i in range(len(texts)):
        print(f"{vectors[0] @ vectors[i]:.4f}")
    engine.shutdown()


asyncio.run(main())
