"""Use LoRA adapters and the base model in one batch.

python examples/lora.py MODEL ADAPTER [ADAPTER ...]

Each ADAPTER is a folder that the library peft has saved.
"""

import sys

from vllm_mp import LLM, LoRARequest, SamplingParams

MODEL, *FOLDERS = sys.argv[1:]
PROMPT = "Once upon a time"

with LLM(MODEL, enable_lora=True, max_loras=len(FOLDERS), max_lora_rank=64) as llm:
    # Name and number identify an adapter. None: the base model.
    adapters = [None, *(LoRARequest(folder, number, folder) for number, folder in enumerate(FOLDERS, 1))]
    outputs = llm.generate(
        [PROMPT] * len(adapters), SamplingParams(temperature=0, max_tokens=16), lora_request=adapters
    )
    for adapter, output in zip(adapters, outputs, strict=True):
        print(f"{adapter.lora_name if adapter else 'base model'}: {output.outputs[0].text!r}")
