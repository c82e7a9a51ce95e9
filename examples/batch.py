"""Answer many prompts in a script without asyncio: results in order, a progress bar, failures in their places.

python examples/batch.py [MODEL]
"""

import sys
from collections.abc import Iterator

from vllm_mp import LLM, RequestFailure, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"


def prompts() -> Iterator[str]:
    """Yield prompts when the engine has room for them; they could come from a file that does not fit into memory."""
    for number in range(1, 101):
        yield f"{number} plus {number} is"
    yield "far too long " * 10_000


with LLM(MODEL) as llm:
    outputs = llm.generate(prompts(), SamplingParams(temperature=0, max_tokens=8))
    for output in outputs[:3]:
        print(repr(output.outputs[0].text))
    for output in outputs:
        if isinstance(output, RequestFailure):
            print(f"request {output.request_id} failed: {output.error}")

    conversation = [{"role": "user", "content": "What is the capital of France?"}]
    (answer,) = llm.chat(conversation, SamplingParams(temperature=0, max_tokens=16))
    print(repr(answer.outputs[0].text))
