"""Stream a completion, token by token.

python examples/streaming.py [MODEL]
"""

import asyncio
import sys

from vllm_mp import AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"


async def main() -> None:
    async with await AsyncLLM.start(AsyncEngineArgs(model=MODEL)) as llm:
        # DELTA: each output has only the text that is new.
        params = SamplingParams(temperature=0.8, seed=1, max_tokens=64, output_kind=RequestOutputKind.DELTA)
        async for output in llm.generate("Once upon a time", params):
            print(output.outputs[0].text, end="", flush=True)
        print(f"\n({output.outputs[0].finish_reason})")


asyncio.run(main())
