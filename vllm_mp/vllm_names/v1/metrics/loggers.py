"""Stat loggers, where programs for vLLM import them from."""

from vllm_mp import LoggingStatLogger, PrometheusStatLogger, StatLoggerBase
from vllm_mp.arguments.unserved_names import refuse
from vllm_mp.client.stat_loggers import AggregateStatLoggerBase, StatLoggerFactory

__all__ = [
    "AggregateStatLoggerBase",
    "LoggingStatLogger",
    "PrometheusStatLogger",
    "StatLoggerBase",
    "StatLoggerFactory",
]

__getattr__ = refuse(
    __name__,
    dict.fromkeys(
        ("AggregatedLoggingStatLogger", "PerEngineStatLoggerAdapter"),
        "one logger records all cores of an engine; use LoggingStatLogger, or derive from StatLoggerBase",
    ),
)
