"""Modules under the names that programs import from `vllm.v1.engine`."""

from typing import Literal

from vllm_mp.arguments.unserved_names import refuse
from vllm_mp.client.stats import FinishReason

__all__ = ["FinishReason", "PauseMode"]

PauseMode = Literal["abort", "wait", "keep"]
"""What `AsyncLLM.pause_generation` does with running requests."""

__getattr__ = refuse(
    __name__,
    {
        "EngineCoreOutput": "AsyncLLM.generate yields RequestOutput",
        "EngineCoreOutputs": "AsyncLLM.generate yields RequestOutput",
        "EngineCoreRequest": "give AsyncLLM.generate a prompt",
    },
)
