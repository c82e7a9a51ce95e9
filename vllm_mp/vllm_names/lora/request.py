"""The name of an adapter in a request, where programs for vLLM import it from."""

from vllm_mp import LoRARequest

__all__ = ["LoRARequest"]
