import asyncio

from vllm_mp import AsyncEngineArgs, AsyncLLMEngine, SamplingParams


async def process_request(engine, prompt, request_id):
    sampling_params = SamplingParams(temperature=0.7, max_tokens=100)

    results = []
    async for output in engine.generate(prompt, sampling_params, request_id):
        results.append(output)

    return request_id, results[-1].outputs[0].text


async def concurrent_generation():
    engine_args = AsyncEngineArgs(
        model="microsoft/DialoGPT-medium",
        max_num_seqs=10,  # Support up to 10 concurrent requests
    )
    engine = AsyncLLMEngine.from_engine_args(engine_args)

    # Process multiple requests concurrently
    prompts = [
        "The future of AI is",
        "Once upon a time",
        "In a galaxy far away",
        "The secret to happiness",
    ]

    # Create concurrent tasks
    tasks = [process_request(engine, prompt, f"req-{i}") for i, prompt in enumerate(prompts)]

    # Wait for all requests to complete
    results = await asyncio.gather(*tasks)

    for request_id, generated_text in results:
        print(f"{request_id}: {generated_text}")


asyncio.run(concurrent_generation())
