"""Share a core between two clients, which could be two programs. The core lives until it is told to stop.

python examples/shared_core.py [MODEL]
"""

import asyncio
import subprocess
import sys
import tempfile

from vllm_mp import AsyncLLM, RequestOutputKind, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"
PARAMS = SamplingParams(temperature=0, max_tokens=16, output_kind=RequestOutputKind.FINAL_ONLY)


async def client(name: str, address: str) -> None:
    async with await AsyncLLM.aconnect(address, timeout=60) as llm:
        async for output in llm.generate("Once upon a time", PARAMS):
            print(f"{name}: {output.outputs[0].text!r}")


async def main(address: str) -> None:
    await asyncio.gather(client("first", address), client("second", address))


with tempfile.TemporaryDirectory() as folder:
    address = f"ipc://{folder}/core.sock"
    # In a shell: vllm-mp engine --listen ADDRESS --model MODEL
    command = [sys.executable, "-m", "vllm_mp.cli", "engine", "--listen", address, "--model", MODEL]
    with subprocess.Popen(command) as core:
        try:
            asyncio.run(main(address))
        finally:
            core.terminate()
