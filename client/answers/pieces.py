"""The pieces into which parsers split the text of an answer: content, reasoning, and the parts of tool calls."""

import msgspec


class ContentPiece(msgspec.Struct, frozen=True):
    """Text of the answer itself."""

    text: str


class ReasoningPiece(msgspec.Struct, frozen=True):
    """Text of the thought before the answer."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """The beginning of a tool call. `index` counts the calls of an answer from 0."""

    index: int
    name: str
    """Name of a tool of the request."""


class CallArguments(msgspec.Struct, frozen=True):
    """A part of the JSON text of a call's arguments. The parts of a complete call, joined, are a JSON object."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True):
    """The end of a call's arguments."""

    index: int
    complete: bool = True
    """False if the answer ended inside the arguments, or if they are malformed. The arguments so far stand as they are:
    closing them would hide that a part is missing."""


Piece = ContentPiece | ReasoningPiece | CallStart | CallArguments | CallEnd
