"""The text of an answer, cut into parts in several ways, and what parsers make of it."""

import itertools
import random

from vllm_mp.client.answer_parser import AnswerParser, join_pieces
from vllm_mp.client.tool_parsers import TOOL_PARSERS, NamedToolParser, Tool

TOOLS = (
    Tool(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "metric": {"type": "boolean"},
                "unit": {"type": ["string", "null"]},
                "share": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                "options": {"type": "object"},
                "places": {"type": "array"},
                "level": {"enum": ["low", "high"]},
                "anything": {},
            },
        },
    ),
    Tool("get"),
    Tool("now"),
)


def tool_parser(name):
    return NamedToolParser(TOOLS[:1]) if name == "named" else TOOL_PARSERS.get(name)(TOOLS)


def parts_of(text, cuts):
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(borders)]


def divisions(text):
    """Return `text` whole, by character, and cut at random."""
    cuts = random.Random(text).sample(range(len(text) + 1), k=min(5, len(text)))
    return [[text], list(text), parts_of(text, cuts)]


def pieces_of(parser, parts):
    return [piece for part in parts for piece in parser.feed(part)] + parser.finish()


def parsed(parser, parts):
    return join_pieces(pieces_of(parser, parts))


def in_order(pieces):
    """Return the answer, and the kinds of its pieces, each kind once where pieces of one kind follow each other."""
    return join_pieces(pieces), [kind for kind, _ in itertools.groupby(map(type, pieces))]


def split(name, text, reasoning=None):
    """Return what the tool parser `name` makes of a whole answer."""
    return AnswerParser(reasoning, tool_parser(name) if name else None).parse(text)
