"""The options of an engine, where programs for vLLM import them from."""

from vllm_mp.engine_args import AsyncEngineArgs, EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]
