import asyncio

from vllm_mp import AsyncEngineArgs, AsyncLLMEngine, SamplingParams


async def request_with_timeout():
    engine_args = AsyncEngineArgs(model="microsoft/DialoGPT-medium")
    engine = AsyncLLMEngine.from_engine_args(engine_args)

    sampling_params = SamplingParams(
        temperature=0.8,
        max_tokens=500,  # Long generation
    )

    request_id = "timeout-test"

    async def generate_text():
        async for output in engine.generate("Write a very long story", sampling_params, request_id):
            print(f"Generated so far: {len(output.outputs[0].text)} chars")
            yield output

    try:
        # Set a timeout for generation
        results = []
        async with asyncio.timeout(5.0):
            async for output in generate_text():
                results.append(output)
    except asyncio.TimeoutError:
        print("Generation timed out, cancelling request...")
        await engine.abort(request_id)
        print("Request cancelled successfully")


asyncio.run(request_with_timeout())
