"""Stat loggers: the interface, the engine's own, and how an engine calls them."""

from vllm_mp.client.stat_loggers.base import (
    AggregateStatLoggerBase,
    StatLoggerArgument,
    StatLoggerBase,
    StatLoggerFactory,
)
from vllm_mp.client.stat_loggers.log_lines import LoggingStatLogger
from vllm_mp.client.stat_loggers.stat_loggers import StatLoggers, requested_loggers

__all__ = [
    "AggregateStatLoggerBase",
    "LoggingStatLogger",
    "StatLoggerArgument",
    "StatLoggerBase",
    "StatLoggerFactory",
    "StatLoggers",
    "requested_loggers",
]
