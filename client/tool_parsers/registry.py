"""The tool parsers that an option can name."""

from vllm_mp.client.answers.parser_registry import ParserRegistry
from vllm_mp.client.tool_parsers.tool_parser import ToolParser

TOOL_PARSERS: ParserRegistry[ToolParser] = ParserRegistry("tool parser")

register_tool_parser = TOOL_PARSERS.add
