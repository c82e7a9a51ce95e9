"""Ask two questions about an image: for the second, the core reads only what is new.

python examples/images.py [MODEL [IMAGE]]

It needs a model that takes images, of Idefics3, SmolVLM or LLaVA, and Pillow (`pip install 'vllm-mp[images]'`). Without
an IMAGE, a file such as PNG or JPEG, it asks about a red circle.
"""

import asyncio
import sys
from typing import Any

from PIL import Image, ImageDraw

from vllm_mp import AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolVLM-256M-Instruct"
QUESTIONS = ["What is on this image?", "Which colours does it have?"]


def given_image() -> Image.Image:
    if len(sys.argv) > 2:
        return Image.open(sys.argv[2])
    image = Image.new("RGB", (640, 480), "white")
    ImageDraw.Draw(image).ellipse((200, 120, 440, 360), fill="red")
    return image


async def main() -> None:
    params = SamplingParams(temperature=0, max_tokens=60, output_kind=RequestOutputKind.FINAL_ONLY)
    messages: list[dict[str, Any]] = []
    content: list[dict[str, Any]] = [{"type": "image_pil", "image_pil": given_image()}]
    async with await AsyncLLM.start(AsyncEngineArgs(model=MODEL)) as llm:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": [*content, {"type": "text", "text": question}]})
            content = []  # the image stays in the conversation
            async for output in llm.chat(messages, params):
                answer = output.outputs[0].text
            messages.append({"role": "assistant", "content": answer})
            num_read = len(output.prompt_token_ids) - (output.num_cached_tokens or 0)
            print(f"{question} ({num_read} of {len(output.prompt_token_ids)} tokens were read)\n    {answer}")


asyncio.run(main())
