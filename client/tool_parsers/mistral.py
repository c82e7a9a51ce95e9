"""The formats of Mistral's models: `[TOOL_CALLS]` before a JSON list, or before a name and JSON arguments."""

import re
from collections.abc import Sequence

from vllm_mp.client.answers.reader import Reading
from vllm_mp.client.tool_parsers.json_call import constrained_json_calls, read_json_calls, stream_arguments
from vllm_mp.client.tool_parsers.registry import register_tool_parser
from vllm_mp.client.tool_parsers.tool_parser import CallFormat, ConstrainedCall, Tool, ToolParser

_BEGIN, _ARGUMENTS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_ID_TEXT = re.compile(r"[A-Za-z0-9]*")
_MAX_ID_LENGTH = 64


@register_tool_parser
class MistralToolParser(ToolParser):
    """Reads `[TOOL_CALLS][{"name": "f", "arguments": {…}}, …]` and `[TOOL_CALLS]f[ARGS]{…}`, with or without `[ARGS]`.

    Ids that the model writes are dropped.
    """

    name = "mistral"
    markers = (_BEGIN, _ARGUMENTS, _ID)

    @classmethod
    def detect(cls, chat_template: str) -> bool:
        return _BEGIN in chat_template

    @classmethod
    def call_format(cls, tools: Sequence[Tool], chat_template: str) -> CallFormat:
        if _ARGUMENTS in chat_template:
            named = (
                ConstrainedCall(tool.name, f"{_BEGIN}{tool.name}{_ARGUMENTS}", tool.parameters, "") for tool in tools
            )
            return CallFormat(tuple(named), trigger=_BEGIN)
        items = constrained_json_calls(tools, "arguments")
        return CallFormat(items, trigger=_BEGIN, begin=f"{_BEGIN}[", separator=", ", end="]")

    def parse(self) -> Reading[None]:
        answer = self.answer
        while (yield from answer.find(_BEGIN)):
            yield from answer.literal(_BEGIN)
            yield from answer.whitespace()
            if (yield from answer.peek()) in ("[", "{"):
                yield from read_json_calls(answer, self.tools, any_keys=True)
            else:
                yield from self._named_call()
            answer.release()

    def _named_call(self) -> Reading[None]:
        answer = self.answer
        name = yield from answer.one_of(tuple(self.tools), before=(_ARGUMENTS, _ID, "{", " {"))
        if name is None:
            return
        if (yield from answer.literal(_ID)):
            yield from answer.run(_ID_TEXT, _MAX_ID_LENGTH)
        yield from answer.literal(_ARGUMENTS)
        yield from answer.whitespace()
        if (yield from answer.peek()) == "{":
            yield from stream_arguments(answer, name)
