"""The engine and its options, where programs for vLLM import them from."""

from vllm_mp import AsyncEngineArgs, AsyncLLM

__all__ = ["AsyncEngineArgs", "AsyncLLM"]
