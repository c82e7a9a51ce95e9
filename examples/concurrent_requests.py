"""Answer several conversations at a time: the engine computes them in shared steps.

python examples/concurrent_requests.py [MODEL]
"""

import asyncio
import sys

from vllm_mp import AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"
QUESTIONS = ["What is the capital of France?", "Why is the sky blue?", "Name three colours."]


async def answer(llm: AsyncLLM, question: str) -> str:
    params = SamplingParams(temperature=0, max_tokens=40, output_kind=RequestOutputKind.FINAL_ONLY)
    async for output in llm.chat([{"role": "user", "content": question}], params):
        text = output.outputs[0].text
    return text


async def main() -> None:
    async with await AsyncLLM.start(AsyncEngineArgs(model=MODEL)) as llm:
        answers = await asyncio.gather(*(answer(llm, question) for question in QUESTIONS))
        for question, text in zip(QUESTIONS, answers, strict=True):
            print(f"{question}\n    {text}")


asyncio.run(main())
