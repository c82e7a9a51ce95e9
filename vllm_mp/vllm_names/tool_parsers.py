"""The parsers of tool calls under the name that programs import from `vllm.tool_parsers`."""

from vllm_mp.arguments.unserved_names import refuse
from vllm_mp.client.tool_parsers import ToolParser

__all__ = ["ToolParser"]

__getattr__ = refuse(
    __name__,
    {
        "ToolParserManager": "vllm_mp.client.tool_parsers has TOOL_PARSERS, whose `get` finds a class by its name, and "
        "register_tool_parser, which adds one"
    },
)
