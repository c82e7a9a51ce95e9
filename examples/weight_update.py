"""Change the weights of a running engine: running requests are frozen, and continue with the new weights.

python examples/weight_update.py [MODEL]
"""

import asyncio
import shutil
import sys
import tempfile
from pathlib import Path

from safetensors.torch import load_file, save_file

from vllm_mp import AsyncEngineArgs, AsyncLLM, SamplingParams
from vllm_mp.model_store import resolve_model

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"


def train(folder: Path) -> None:
    """Stand in for training: weaken the last layers."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        tensors |= {name: tensor * 0.9 for name, tensor in tensors.items() if "down_proj" in name}
        save_file(tensors, file, {"format": "pt"})


async def main(folder: Path) -> None:
    async with await AsyncLLM.start(AsyncEngineArgs(model=str(folder))) as llm:
        story = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
        first = await anext(story)
        await llm.sleep(level=2, mode="keep")  # frees the weights and the KV cache; `story` waits
        await asyncio.to_thread(train, folder)
        await llm.wake_up()  # loads the weights from the folder
        async for output in story:
            last = output
        print(repr(first.outputs[0].text), "was written with the old weights, and the rest with the new ones:")
        print(repr(last.outputs[0].text))


with tempfile.TemporaryDirectory() as name:
    shutil.copytree(resolve_model(MODEL), name, dirs_exist_ok=True)
    asyncio.run(main(Path(name)))
