"""Parsers that find the tool calls in the text of an answer, one for each format that models write."""

from vllm_mp.client.answers.pieces import CallArguments, CallEnd, CallStart, ContentPiece, Piece
from vllm_mp.client.tool_parsers.hermes import HermesToolParser
from vllm_mp.client.tool_parsers.json_list import JsonToolParser, NamedToolParser
from vllm_mp.client.tool_parsers.llama3_json import Llama3JsonToolParser
from vllm_mp.client.tool_parsers.mistral import MistralToolParser
from vllm_mp.client.tool_parsers.pythonic import PythonicToolParser
from vllm_mp.client.tool_parsers.qwen3_coder import Qwen3CoderToolParser
from vllm_mp.client.tool_parsers.registry import TOOL_PARSERS, register_tool_parser
from vllm_mp.client.tool_parsers.tool_parser import CallFormat, ConstrainedCall, Tool, ToolParser

tool_parser_for_template = TOOL_PARSERS.for_template

__all__ = [
    "TOOL_PARSERS",
    "CallArguments",
    "CallEnd",
    "CallFormat",
    "CallStart",
    "ConstrainedCall",
    "ContentPiece",
    "HermesToolParser",
    "JsonToolParser",
    "Llama3JsonToolParser",
    "MistralToolParser",
    "NamedToolParser",
    "Piece",
    "PythonicToolParser",
    "Qwen3CoderToolParser",
    "Tool",
    "ToolParser",
    "register_tool_parser",
    "tool_parser_for_template",
]
