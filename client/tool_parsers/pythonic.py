"""The format of Llama 3.2 and Llama 4 with pythonic templates: a Python list of calls."""

import json
import re

from vllm_mp.client.answers.reader import Reading
from vllm_mp.client.tool_parsers.python_value import read_python_value
from vllm_mp.client.tool_parsers.registry import register_tool_parser
from vllm_mp.client.tool_parsers.tool_parser import ToolParser

_BEGIN, _END = "<|python_start|>", "<|python_end|>"
_WORD = re.compile(r"\w*")
_MAX_WORD_LENGTH = 256


@register_tool_parser
class PythonicToolParser(ToolParser):
    """Reads `[f(a=1, b="x"), g()]`, with or without `<|python_start|>` and `<|python_end|>`.

    A list begins at the beginning of the answer or of a line, or after the tag. Arguments are literals of Python:
    strings, numbers, True, False, None, lists, tuples and dicts.
    """

    name = "pythonic"
    markers = (_BEGIN, _END)

    @classmethod
    def detect(cls, chat_template: str) -> bool:
        return "[func_name1(" in chat_template

    def parse(self) -> Reading[None]:
        answer = self.answer
        yield from answer.whitespace()
        while True:
            yield from answer.literal(_BEGIN)
            yield from answer.whitespace()
            yield from self._list()
            answer.release()
            if not (yield from answer.find_line("[", _BEGIN)):
                return

    def _list(self) -> Reading[None]:
        answer = self.answer
        if not (yield from answer.literal("[")):
            return
        yield from answer.whitespace()
        while True:
            name = yield from answer.one_of(tuple(self.tools), before=("(",))
            if name is None or not (yield from self._call(name)):
                return
            yield from answer.whitespace()
            has_comma = yield from answer.literal(",")
            yield from answer.whitespace()
            if (yield from answer.literal("]")):
                answer.drop()
                yield from answer.whitespace()
                if (yield from answer.literal(_END, may_be_cut_off=True)):
                    answer.drop()
                return
            if not has_comma:
                return

    def _call(self, name: str) -> Reading[bool]:
        """Read the arguments of a call. Return whether the list may go on after it."""
        answer = self.answer
        yield from answer.literal("(")
        yield from answer.whitespace()
        if (yield from answer.literal(")")):
            answer.start_call(name)
            answer.arguments("{}")
            answer.end_call()
            return True
        keyword = yield from self._keyword()
        if keyword is None:
            return False
        answer.start_call(name)
        separator = "{"
        while keyword is not None:
            answer.drop()
            answer.arguments(f"{separator}{json.dumps(keyword, ensure_ascii=False)}: ")
            separator = ", "
            if not (yield from read_python_value(answer)):
                break
            yield from answer.whitespace()
            has_comma = yield from answer.literal(",")
            yield from answer.whitespace()
            if (yield from answer.literal(")")):
                answer.drop()
                answer.arguments("}")
                answer.end_call()
                return True
            keyword = (yield from self._keyword()) if has_comma else None
        answer.end_call(complete=False)
        if answer.ended:
            answer.drop_rest()
        return False

    def _keyword(self) -> Reading[str | None]:
        """Hold the name of an argument with its equals sign; return the name, or None for any other text."""
        answer = self.answer
        word = yield from answer.run(_WORD, _MAX_WORD_LENGTH)
        yield from answer.whitespace()
        if not word.isidentifier() or not (yield from answer.literal("=")):
            return None
        yield from answer.whitespace()
        return word
