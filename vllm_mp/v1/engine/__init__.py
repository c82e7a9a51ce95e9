"""Modules under the names that programs import from `vllm.v1.engine`."""

from vllm_mp.client.stats import FinishReason
from vllm_mp.unserved_names import refuse

__all__ = ["FinishReason"]

__getattr__ = refuse(__name__, {"EngineCoreRequest": "give AsyncLLM.generate a prompt"})
