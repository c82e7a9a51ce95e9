"""The options of an engine, where programs for vLLM import them from."""

from vllm_mp.config.engine_args import AsyncEngineArgs, EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]
