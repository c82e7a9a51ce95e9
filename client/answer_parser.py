"""The parsers of one answer in a row, and whole answers."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm_mp.client.answer_pieces import CallArguments, CallEnd, CallStart, ContentPiece, Piece, ReasoningPiece
from vllm_mp.client.reasoning import ReasoningParser
from vllm_mp.client.tool_parsers import ToolParser


@dataclass
class ParsedCall:
    """A tool call of a parsed answer."""

    name: str
    arguments: str = ""
    """JSON text."""
    complete: bool = False
    """False if the answer ended inside the arguments, or if they are malformed."""


@dataclass
class ParsedAnswer:
    """What the pieces of an answer amount to."""

    reasoning: str = ""
    content: str = ""
    calls: list[ParsedCall] = field(default_factory=list)

    def add(self, pieces: Iterable[Piece]) -> None:
        """Add further pieces."""
        for piece in pieces:
            match piece:
                case ContentPiece(text):
                    self.content += text
                case ReasoningPiece(text):
                    self.reasoning += text
                case CallStart(_, name):
                    self.calls.append(ParsedCall(name))
                case CallArguments(index, text):
                    self.calls[index].arguments += text
                case CallEnd(index, complete):
                    self.calls[index].complete = complete


class AnswerParser:
    """Splits the text of one answer into reasoning, content and tool calls, as the given parsers do.

    Tool calls are found in the content alone: a call within a thought is reasoning.
    """

    def __init__(self, reasoning: ReasoningParser | None = None, tools: ToolParser | None = None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    def feed(self, text: str) -> list[Piece]:
        """Add text of the answer. Return the pieces that it continues or completes."""
        if self._reasoning is None:
            return self._split_content([ContentPiece(text)] if text else [])
        return self._split_content(self._reasoning.feed(text))

    def finish(self) -> list[Piece]:
        """End the answer. Return the last pieces."""
        pieces = self._split_content(self._reasoning.finish() if self._reasoning is not None else [])
        return pieces + (self._tools.finish() if self._tools is not None else [])

    def parse(self, text: str) -> ParsedAnswer:
        """Return the parts of a whole answer. The parser can be used for no other answer."""
        answer = ParsedAnswer()
        answer.add(self.feed(text))
        answer.add(self.finish())
        return answer

    def _split_content(self, pieces: list[Piece]) -> list[Piece]:
        """Return `pieces` with what the tool parser makes of their content."""
        if self._tools is None:
            return pieces
        split: list[Piece] = []
        for piece in pieces:
            split += self._tools.feed(piece.text) if isinstance(piece, ContentPiece) else [piece]
        return split
