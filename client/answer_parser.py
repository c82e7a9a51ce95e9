"""The text of an answer goes through a reasoning parser and a tool parser; their pieces are joined."""

from collections.abc import Iterable
from dataclasses import dataclass

from vllm_mp.client.answers.pieces import CallArguments, CallEnd, CallStart, ContentPiece, Piece, ReasoningPiece
from vllm_mp.client.reasoning import ReasoningParser
from vllm_mp.client.tool_parsers import ToolParser


@dataclass(frozen=True)
class ParsedCall:
    """A tool call of a parsed answer."""

    name: str
    arguments: str
    """JSON text."""
    complete: bool = True
    """False if the answer ended inside the arguments, or if they are malformed."""


@dataclass(frozen=True)
class ParsedAnswer:
    """The parts of an answer."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ParsedCall, ...] = ()


def join_pieces(pieces: Iterable[Piece]) -> ParsedAnswer:
    """Return the answer that consists of `pieces`."""
    reasoning: list[str] = []
    content: list[str] = []
    names: list[str] = []
    arguments: list[list[str]] = []
    complete: set[int] = set()
    for piece in pieces:
        match piece:
            case ContentPiece(text):
                content.append(text)
            case ReasoningPiece(text):
                reasoning.append(text)
            case CallStart(_, name):
                names.append(name)
                arguments.append([])
            case CallArguments(index, text):
                arguments[index].append(text)
            case CallEnd(index, True):
                complete.add(index)
    calls = (
        ParsedCall(name, "".join(arguments[index]), complete=index in complete) for index, name in enumerate(names)
    )
    return ParsedAnswer("".join(reasoning), "".join(content), tuple(calls))


class AnswerParser:
    """Splits the text of one answer into reasoning, content and tool calls, as the given parsers do.

    Tool calls are found in the content alone: a call within a thought is reasoning.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        tools: ToolParser | None = None,
        *,
        calls_after: str | None = None,
    ) -> None:
        """`calls_after`: a constraint holds the content to calls alone from this text on; "": from its beginning.

        What the parser of calls cannot read there is a call that the end of the answer cuts off; it is dropped.
        """
        self._reasoning = reasoning
        self._tools = tools
        self._calls_after = calls_after
        self._is_in_calls = calls_after == ""
        """All that comes are calls."""
        self.markers = frozenset(marker for parser in (reasoning, tools) if parser for marker in parser.markers)
        """Texts that the parsers must see. The detokenizer must not skip those that are special tokens of the model."""

    def feed(self, text: str) -> list[Piece]:
        """Add text of the answer. Return the pieces that it continues or completes."""
        if self._reasoning is None:
            return self._split_content([ContentPiece(text)] if text else [])
        return self._split_content(self._reasoning.feed(text))

    def finish(self) -> list[Piece]:
        """End the answer. Return the last pieces."""
        pieces = self._split_content(self._reasoning.finish() if self._reasoning is not None else [])
        return pieces + (self._without_markup(self._tools.finish()) if self._tools is not None else [])

    def parse(self, text: str) -> ParsedAnswer:
        """Return the parts of a whole answer. The parser can be used for no other answer."""
        return join_pieces(self.feed(text) + self.finish())

    def _split_content(self, pieces: list[Piece]) -> list[Piece]:
        """Return `pieces` with what the tool parser makes of their content."""
        if self._tools is None:
            return pieces
        split: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, ContentPiece):
                split += self._without_markup(self._tools.feed(piece.text))
            else:
                split.append(piece)
        return split

    def _without_markup(self, pieces: list[Piece]) -> list[Piece]:
        """Return `pieces` of the tool parser without content where all are calls."""
        if self._calls_after is None:
            return pieces
        kept: list[Piece] = []
        for piece in pieces:
            self._is_in_calls = self._is_in_calls or isinstance(piece, CallStart)
            if not isinstance(piece, ContentPiece):
                kept.append(piece)
            elif not self._is_in_calls:
                text, found, _ = piece.text.partition(self._calls_after)
                self._is_in_calls = bool(found)
                kept += [ContentPiece(text)] if text else []
        return kept
