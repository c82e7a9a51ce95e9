"""The kinds of program around an engine, where programs for vLLM import them from."""

from vllm_mp import UsageContext

__all__ = ["UsageContext"]
