"""The format of Llama 3.1 to 3.3, and of Llama 4 with its own template: bare JSON objects."""

from collections.abc import Sequence

from vllm_mp.client.answers.reader import Reading
from vllm_mp.client.tool_parsers.json_call import constrained_json_calls, read_json_call
from vllm_mp.client.tool_parsers.registry import register_tool_parser
from vllm_mp.client.tool_parsers.tool_parser import CallFormat, Tool, ToolParser

_TAG = "<|python_tag|>"


@register_tool_parser
class Llama3JsonToolParser(ToolParser):
    """Reads `{"name": "f", "parameters": {…}}`, with or without `<|python_tag|>`, several separated by `;`.

    A call begins at the beginning of the answer or of a line, after the tag, or after another call.
    """

    name = "llama3_json"
    markers = (_TAG,)

    @classmethod
    def detect(cls, chat_template: str) -> bool:
        return '{"name": function name, "parameters"' in chat_template

    @classmethod
    def call_format(cls, tools: Sequence[Tool], chat_template: str) -> CallFormat:
        return CallFormat(constrained_json_calls(tools, "parameters"), trigger='{"name": ', separator="; ")

    def parse(self) -> Reading[None]:
        answer = self.answer
        yield from answer.whitespace()
        while True:
            yield from answer.literal(_TAG)
            yield from answer.whitespace()
            while (yield from read_json_call(answer, self.tools)):
                yield from answer.whitespace()
                yield from answer.literal(";")
                yield from answer.whitespace()
            answer.release()
            if not (yield from answer.find_line("{", _TAG)):
                return
