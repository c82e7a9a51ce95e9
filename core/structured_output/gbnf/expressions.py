"""The expressions of which the rules of a grammar consist."""

from collections.abc import Iterable
from dataclasses import dataclass

CodeRange = tuple[int, int]
"""The first and the last of successive code points."""

_UNICODE: list[CodeRange] = [(0, 0xD7FF), (0xE000, 0x10FFFF)]
"""All characters: surrogates are none."""


@dataclass(frozen=True, slots=True)
class Literal:
    """A text."""

    text: str


@dataclass(frozen=True, slots=True)
class Characters:
    """One character out of a set."""

    ranges: tuple[CodeRange, ...]
    """They may overlap."""

    def complement(self) -> "Characters":
        """Return all characters but these."""
        rest = _UNICODE
        for low, high in self.ranges:
            pieces = [[(first, min(last, low - 1)), (max(first, high + 1), last)] for first, last in rest]
            rest = [(first, last) for pair in pieces for first, last in pair if first <= last]
        return Characters(tuple(rest))


ANY_CHARACTER = Characters(tuple(_UNICODE))


@dataclass(frozen=True, slots=True)
class Reference:
    """What the rule of this name derives."""

    rule: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """One item after the other."""

    items: tuple["Expression", ...]


@dataclass(frozen=True, slots=True)
class Alternatives:
    """One of several expressions."""

    options: tuple["Expression", ...]


@dataclass(frozen=True, slots=True)
class Repetition:
    """An expression `low` to `high` times; None: any number of times."""

    item: "Expression"
    low: int
    high: int | None


Expression = Literal | Characters | Reference | Sequence | Alternatives | Repetition
Rules = dict[str, Expression]
"""The rules of a grammar by name. All that they refer to are there; an output begins with "root"."""


def sequence(items: Iterable[Expression]) -> Expression:
    """Return the sequence of `items`; a single item is that item."""
    each = tuple(items)
    return each[0] if len(each) == 1 else Sequence(each)
