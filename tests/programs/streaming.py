import asyncio

from vllm_mp import AsyncEngineArgs, AsyncLLMEngine, SamplingParams


async def stream_text():
    engine_args = AsyncEngineArgs(model="microsoft/DialoGPT-medium")
    engine = AsyncLLMEngine.from_engine_args(engine_args)

    sampling_params = SamplingParams(
        temperature=0.8,
        max_tokens=150,
        # Enable streaming output
    )

    request_id = "stream-001"
    prompt = "Tell me a story about"

    print("Streaming generation:")
    async for output in engine.generate(prompt, sampling_params, request_id):
        if output.outputs:
            # Print only the new text (delta)
            text = output.outputs[0].text
            print(text, end="", flush=True)

    print("\nGeneration complete!")


asyncio.run(stream_text())
