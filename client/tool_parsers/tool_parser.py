"""The interface of tool parsers: the text of an answer becomes content and tool calls."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_mp.client.answers.incremental_parser import IncrementalParser


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a request offers to the model."""

    name: str
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object"})
    """JSON schema of the arguments."""


@dataclass(frozen=True, slots=True)
class ConstrainedCall:
    """One call as a grammar: the text `begin`, a JSON object that satisfies `arguments`, the text `end`."""

    name: str
    begin: str
    arguments: dict[str, Any]
    """JSON schema."""
    end: str
    is_lenient: bool = False
    """Keywords of the schema that a grammar does not have are left out; otherwise they are refused."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The calls of an answer as a grammar: the text `begin`, calls with `separator` between them, the text `end`."""

    calls: tuple[ConstrainedCall, ...]
    """One for each tool. Each call of the answer is one of them."""
    trigger: str = ""
    """Where the model may choose between text and calls, the grammar applies from this text on, with which the calls
    begin; "" if it applies from the beginning of the answer."""
    begin: str = ""
    separator: str = ""
    end: str = ""


class ToolParser(IncrementalParser):
    """Splits the text of one answer into content and calls of the request's tools.

    A subclass describes one format. Text that is not a call of a known tool is content, to the character. A call begins
    when the name of a known tool and the beginning of its arguments have been read, and is never taken back: if the
    arguments turn out to be malformed, the call ends there as incomplete, and the rest of the text is content.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.tools = {tool.name: tool for tool in tools}
        super().__init__()

    @classmethod
    def call_format(cls, tools: Sequence[Tool], chat_template: str) -> CallFormat | None:
        """Return the calls of `tools`, at least one, as a grammar.

        None means that the format is not made of JSON. An answer that must be a call then has the format of
        `JsonToolParser` and is parsed by it; where the model may also write text, its calls cannot be constrained.
        """
        return None
