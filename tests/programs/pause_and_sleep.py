import asyncio
import sys

from vllm_mp.engine.arg_utils import AsyncEngineArgs
from vllm_mp.sampling_params import RequestOutputKind, SamplingParams
from vllm_mp.v1.engine.async_llm import AsyncLLM


async def generate(engine, request_id):
    sampling_params = SamplingParams(temperature=0, max_tokens=24, output_kind=RequestOutputKind.DELTA)
    text = ""
    async for output in engine.generate("Once upon a time", sampling_params, request_id=request_id):
        text += output.outputs[0].text
    return text


async def main():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=sys.argv[1], max_model_len=512, dtype="float32"))
    expected = await generate(engine, "before")

    await engine.pause_generation(mode="keep")
    task = asyncio.create_task(generate(engine, "paused"))
    await asyncio.sleep(0.5)
    print(f"paused: {await engine.is_paused()}, finished: {task.done()}")
    await engine.resume_generation()
    print(f"same text after the pause: {await task == expected}")

    for level in (1, 2):
        await engine.sleep(level=level, mode="keep")
        print(f"sleeping: {await engine.is_sleeping()}")
        await engine.wake_up()
        print(f"same text after level {level}: {await generate(engine, f'level-{level}') == expected}")
    engine.shutdown()


asyncio.run(main())
