"""The blocking engine, where programs for vLLM import it from."""

from vllm_mp import LLM

__all__ = ["LLM"]
