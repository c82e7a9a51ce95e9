"""The format of Hermes, Qwen2.5, Qwen3 and SmolLM2: JSON between tags."""

from collections.abc import Sequence

from vllm_mp.client.answers.reader import Reading
from vllm_mp.client.tool_parsers.json_call import constrained_json_calls, read_json_calls
from vllm_mp.client.tool_parsers.registry import register_tool_parser
from vllm_mp.client.tool_parsers.tool_parser import CallFormat, Tool, ToolParser

_BEGIN, _END = "<tool_call>", "</tool_call>"
_OTHER_FORMATS = ("<function=", "<arg_key>")
"""Found in templates of models that write other things between the same tags."""


@register_tool_parser
class HermesToolParser(ToolParser):
    """Reads `<tool_call>{"name": "f", "arguments": {…}}</tool_call>`, any number of them anywhere in the answer.

    The tags may also hold a JSON list of calls, as SmolLM2 writes them. A missing end tag or closing brace after the
    arguments is tolerated.
    """

    name = "hermes"
    markers = (_BEGIN, _END)

    @classmethod
    def detect(cls, chat_template: str) -> bool:
        return _BEGIN in chat_template and not any(text in chat_template for text in _OTHER_FORMATS)

    @classmethod
    def call_format(cls, tools: Sequence[Tool], chat_template: str) -> CallFormat:
        calls = constrained_json_calls(tools, "arguments", begin=f"{_BEGIN}\n", end=f"\n{_END}")
        return CallFormat(calls, trigger=_BEGIN, separator="\n")

    def parse(self) -> Reading[None]:
        answer = self.answer
        while (yield from answer.find(_BEGIN)):
            yield from answer.literal(_BEGIN)
            yield from answer.whitespace()
            if (yield from read_json_calls(answer, self.tools, any_keys=True)):
                yield from answer.whitespace()
                if (yield from answer.literal(_END, may_be_cut_off=True)):
                    answer.drop()
            answer.release()
