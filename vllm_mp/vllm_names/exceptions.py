"""Errors under the names that programs import from `vllm.exceptions`: wrong arguments raise ValueError."""

from vllm_mp.arguments.unserved_names import refuse

VLLMValidationError = ValueError
"""What wrong arguments raise."""

__all__ = ["VLLMValidationError"]

__getattr__ = refuse(
    __name__,
    {
        "LoRAAdapterNotFoundError": "an adapter that cannot be loaded raises EngineError",
        "VLLMNotFoundError": "wrong arguments raise ValueError",
        "VLLMUnprocessableEntityError": "wrong arguments raise ValueError",
    },
)
