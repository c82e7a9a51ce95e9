"""The parsers of thoughts under the name that programs import from `vllm.reasoning`."""

from vllm_mp.arguments.unserved_names import refuse
from vllm_mp.client.reasoning import ReasoningParser

__all__ = ["ReasoningParser"]

__getattr__ = refuse(
    __name__,
    {
        "ReasoningParserManager": "vllm_mp.client.reasoning has REASONING_PARSERS, whose `get` finds a class by its "
        "name, and register_reasoning_parser, which adds one"
    },
)
