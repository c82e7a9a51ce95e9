"""Stat loggers of earlier versions, where programs for vLLM import them from."""

from vllm_mp.client.stat_loggers.v0 import Stats
from vllm_mp.client.stat_loggers.v0 import V0StatLoggerBase as StatLoggerBase

__all__ = ["StatLoggerBase", "Stats"]
