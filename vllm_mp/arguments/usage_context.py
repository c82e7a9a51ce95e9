"""Where an engine is used from, as vLLM's callers say it."""

from enum import StrEnum


class UsageContext(StrEnum):
    """Kind of program that uses an engine. It has no effect, because an engine reports its use nowhere."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"
