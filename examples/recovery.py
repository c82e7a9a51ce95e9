"""Kill the core in the middle of a stream, and see the stream continue where it was.

python examples/recovery.py [MODEL]
"""

import asyncio
import os
import signal
import sys

from vllm_mp import AsyncEngineArgs, AsyncLLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"
PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=60, ignore_eos=True)


async def story(llm: AsyncLLM, kill_at: int | None) -> list[int]:
    async for output in llm.generate("Once upon a time", PARAMS):
        token_ids = output.outputs[0].token_ids
        if kill_at is not None and len(token_ids) >= kill_at:
            kill_at = None
            os.kill((await llm.core_status())["pid"], signal.SIGKILL)
            print(f"killed the core after {len(token_ids)} tokens")
    return token_ids


async def main() -> None:
    # In float32 the tokens are the same, because rounding does not depend on how the prompt was cut.
    async with await AsyncLLM.start(AsyncEngineArgs(model=MODEL, dtype="float32")) as llm:
        undisturbed = await story(llm, None)
        continued = await story(llm, kill_at=20)
        print("restarts:", (await llm.core_status())["restarts"])
        print("the same tokens:", continued == undisturbed)


asyncio.run(main())
