"""The format of Qwen3-Coder: a function and its parameters as tags."""

import json
import re
from typing import Any

from vllm_mp.client.answers.json_scanner import is_json
from vllm_mp.client.answers.reader import Reading
from vllm_mp.client.tool_parsers.python_value import json_text_of, python_to_json
from vllm_mp.client.tool_parsers.registry import register_tool_parser
from vllm_mp.client.tool_parsers.tool_parser import ToolParser

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER = "<parameter="
_PARAMETER_ENDS = ("\n</parameter>", "</parameter>")
_VALUE_ENDS = (*_PARAMETER_ENDS, f"\n{_PARAMETER}", f"\n{_FUNCTION_END}")
_KEY = re.compile(r"[^<>\n]*")
_MAX_KEY_LENGTH = 256
_MAX_LITERAL_LENGTH = 10_000
"""Characters of a list or dict of Python that is read as one, because reading it keeps the event loop waiting."""
_STRING_ONLY = frozenset(("string",))
_WORDS = ("true", "false", "null")
_TYPES_BY_BEGINNING = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}


@register_tool_parser
class Qwen3CoderToolParser(ToolParser):
    """Reads `<tool_call><function=f><parameter=key>value</parameter></function></tool_call>`.

    The tool's schema says which values are strings. A string becomes pieces as it arrives. A value of another type
    becomes a piece at its end, as a string if it is of no type that the schema allows. A newline after the first tag of
    a parameter and before the second is not part of the value. A missing `<tool_call>` or `</function>` is tolerated,
    and a missing `</parameter>` before a line that begins with the next tag.
    """

    name = "qwen3_coder"
    markers = (_BEGIN, _END)

    @classmethod
    def detect(cls, chat_template: str) -> bool:
        return _FUNCTION in chat_template and _PARAMETER in chat_template

    def parse(self) -> Reading[None]:
        answer = self.answer
        while (marker := (yield from answer.find(_BEGIN, _FUNCTION))) is not None:
            if marker == _BEGIN:
                yield from answer.literal(_BEGIN)
                yield from answer.whitespace()
            if (yield from answer.literal(_FUNCTION)):
                name = yield from answer.one_of(tuple(self.tools), before=(">",))
                if name is not None:
                    yield from answer.literal(">")
                    yield from self._call(name)
            answer.release()

    def _call(self, name: str) -> Reading[None]:
        answer = self.answer
        types = _parameter_types(self.tools[name].parameters)
        answer.start_call(name)
        separator = "{"
        yield from answer.whitespace()
        while (yield from answer.literal(_PARAMETER)):
            key = yield from answer.run(_KEY, _MAX_KEY_LENGTH)
            if not key or not (yield from answer.literal(">")):
                break
            yield from answer.literal("\n")
            answer.drop()
            answer.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            if not (yield from self._value(types.get(key, _STRING_ONLY))):
                break
            yield from answer.whitespace()
        else:
            if (yield from answer.literal(_FUNCTION_END)) or (
                yield from answer.one_of(("",), before=(_END,))
            ) is not None:
                answer.drop()
                answer.arguments("{}" if separator == "{" else "}")
                answer.end_call()
                yield from answer.whitespace()
                if (yield from answer.literal(_END, may_be_cut_off=True)):
                    answer.drop()
                return
        answer.end_call(complete=False)
        if answer.ended:
            answer.drop_rest()

    def _value(self, types: frozenset[str]) -> Reading[bool]:
        """Turn a value of one of `types` into JSON, and drop its last tag; return False if it does not end."""
        answer = self.answer
        if types == _STRING_ONLY:
            answer.arguments('"')
            end = yield from answer.until(_VALUE_ENDS, lambda text: answer.arguments(json_text_of(text)))
            if end is not None:
                answer.arguments('"')
        else:
            parts: list[str] = []
            end = yield from answer.until(_VALUE_ENDS, parts.append)
            if end is not None:
                answer.arguments(_typed_value("".join(parts), types))
        if end is None:
            return False
        if end in _PARAMETER_ENDS:
            yield from answer.literal(end)
            answer.drop()
        return True


def _parameter_types(schema: dict[str, Any]) -> dict[str, frozenset[str]]:
    """Return the JSON types of each parameter of a tool; empty sets where the schema does not say."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {str(key): _types(value) for key, value in properties.items()}


def _types(schema: Any) -> frozenset[str]:
    """Return the JSON types that `schema` names itself; empty if it names none."""
    if not isinstance(schema, dict):
        return frozenset()
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset((named,))
    if isinstance(named, list):
        return frozenset(name for name in named if isinstance(name, str))
    for choices in (schema.get("anyOf"), schema.get("oneOf")):
        if isinstance(choices, list):
            named = [choice.get("type") if isinstance(choice, dict) else None for choice in choices]
            return frozenset(named) if all(isinstance(name, str) for name in named) else frozenset()
    return _STRING_ONLY if all(isinstance(value, str) for value in schema.get("enum", [None])) else frozenset()


def _typed_value(text: str, types: frozenset[str]) -> str:
    """Return `text`, a value in JSON or Python, as JSON of one of `types`, of any type if `types` is empty.

    A text that is no such value is returned as a string.
    """
    value = _as_json(text.strip())
    if value is not None:
        kind = _TYPES_BY_BEGINNING.get(value[0], "number")
        # A quoted text for a string is the string with its quotes.
        if kind != "string" and (not types or kind in types or (kind == "number" and "integer" in types)):
            return value
    return f'"{json_text_of(text)}"'


def _as_json(value: str) -> str | None:
    """Return a value as JSON: JSON, a word of JSON in any case, None, or a list or dict of Python."""
    if value.lower() in _WORDS:
        return value.lower()
    if value == "None":
        return "null"
    if is_json(value):
        return value
    is_literal = value.startswith(("[", "{")) and len(value) <= _MAX_LITERAL_LENGTH
    return python_to_json(value) if is_literal else None
