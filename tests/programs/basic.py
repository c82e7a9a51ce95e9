import asyncio

from vllm_mp import AsyncEngineArgs, AsyncLLMEngine, SamplingParams


async def main():
    # Initialize async engine
    engine_args = AsyncEngineArgs(model="microsoft/DialoGPT-medium", tensor_parallel_size=1)
    engine = AsyncLLMEngine.from_engine_args(engine_args)

    # Generate text asynchronously
    sampling_params = SamplingParams(temperature=0.8, max_tokens=100)
    request_id = "req-001"

    results = []
    async for output in engine.generate("Hello world", sampling_params, request_id):
        results.append(output)
        print(f"Generated: {output.outputs[0].text}")

    return results


# Run the async function
asyncio.run(main())
