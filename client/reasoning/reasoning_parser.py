"""The reasoning parsers: the thought of a model is split from its answer."""

import re
from typing import ClassVar

from vllm_mp.client.answers.incremental_parser import IncrementalParser
from vllm_mp.client.answers.parser_registry import ParserRegistry
from vllm_mp.client.answers.reader import Reading

_WHITESPACE = re.compile(r"\s*")
_NEWLINES = re.compile(r"\n*")


class ReasoningParser(IncrementalParser):
    """Splits the text of one answer into reasoning and content.

    A thought is at the beginning of the answer. Newlines around its markers belong to the markers, as in the chat
    templates. A thought that never ends is all reasoning. A family that writes other markers is a subclass that names
    them.
    """

    start: ClassVar[str]
    """The marker that begins a thought."""
    end: ClassVar[str]
    """The marker that ends a thought. A constraint on the answer begins after it."""
    always_thinks: ClassVar[bool] = False
    """The model thinks even if neither the prompt nor its answer begins with `start`."""

    def __init__(self, prompt: str = "", begun: str = "") -> None:
        """`prompt` is the text of the prompt, or its end: the chat template may begin the thought there, or end it.

        `begun` is the text at the end of the prompt that the answer continues.
        """
        before = prompt.rstrip().removesuffix(begun.strip()).rstrip()
        begins = begun.lstrip().startswith(self.start)
        self.may_think = self.end not in begun and (begins or not before.endswith(self.end))
        """The answer may hold a thought."""
        self.in_thought = self.may_think and (self.always_thinks or begins or before.endswith(self.start))
        """The answer begins inside a thought."""
        super().__init__()

    def parse(self) -> Reading[None]:
        answer = self.answer
        if not self.may_think:
            return
        yield from answer.run(_NEWLINES if self.in_thought else _WHITESPACE)
        if not (yield from answer.literal(self.start)) and not self.in_thought:
            return
        yield from answer.run(_NEWLINES)
        answer.drop()
        while True:
            marker = yield from answer.until((self.end, "\n"), answer.reasoning)
            yield from answer.run(_NEWLINES)
            if (yield from answer.literal(self.end)):
                break
            # Newlines that no marker follows are part of the thought.
            answer.reasoning(answer.take_held())
            if marker is None:
                return
        yield from answer.run(_NEWLINES)
        answer.drop()


REASONING_PARSERS: ParserRegistry[ReasoningParser] = ParserRegistry("reasoning parser")

register_reasoning_parser = REASONING_PARSERS.add
