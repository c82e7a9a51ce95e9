"""The formats of constrained answers, for models whose own format is not made of JSON."""

from collections.abc import Sequence

from vllm_mp.client.answers.reader import Reading
from vllm_mp.client.tool_parsers.json_call import constrained_json_calls, read_json_calls, stream_arguments
from vllm_mp.client.tool_parsers.registry import register_tool_parser
from vllm_mp.client.tool_parsers.tool_parser import CallFormat, Tool, ToolParser


@register_tool_parser
class JsonToolParser(ToolParser):
    """Reads an answer that is `[{"name": "f", "parameters": {…}}, …]`, or one such object."""

    name = "json"

    @classmethod
    def call_format(cls, tools: Sequence[Tool], chat_template: str) -> CallFormat:
        return CallFormat(constrained_json_calls(tools, "parameters"), begin="[", separator=", ", end="]")

    def parse(self) -> Reading[None]:
        yield from self.answer.whitespace()
        yield from read_json_calls(self.answer, self.tools)


class NamedToolParser(ToolParser):
    """Reads an answer that consists of the arguments of one tool."""

    name = "named"

    def parse(self) -> Reading[None]:
        answer = self.answer
        yield from answer.whitespace()
        if (yield from answer.peek()) == "{":
            (tool,) = self.tools
            yield from stream_arguments(answer, tool)
