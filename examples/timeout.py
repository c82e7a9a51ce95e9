"""End requests early: by a time limit, by leaving the loop, and by id. The core frees their memory at once.

python examples/timeout.py [MODEL]
"""

import asyncio
import sys

from vllm_mp import AsyncEngineArgs, AsyncLLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"
ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True)  # up to the end of the model's context


async def main() -> None:
    async with await AsyncLLM.start(AsyncEngineArgs(model=MODEL)) as llm:
        text = ""
        try:
            async with asyncio.timeout(0.5):
                async for output in llm.generate("A long story:", ENDLESS):
                    text = output.outputs[0].text
        except TimeoutError:
            print(f"time is up after {len(text)} characters")

        async for output in llm.generate("Another story:", ENDLESS):
            if len(output.outputs[0].token_ids) >= 5:
                break  # which aborts the request

        async for output in llm.generate("A third story:", ENDLESS, request_id="third"):
            reason = output.outputs[0].finish_reason
            await llm.abort("third")
        print("the last request ended with", reason)

        await llm.wait_for_requests_to_drain(timeout=10)
        print("requests that still run:", await llm.get_num_unfinished_requests())


asyncio.run(main())
