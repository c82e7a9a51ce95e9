"""The errors of an engine, where programs for vLLM import them from."""

from vllm_mp.errors import EngineDeadError, EngineGenerateError

__all__ = ["EngineDeadError", "EngineGenerateError"]
