"""Deterministic automata of the regular parts of a grammar.

An expression is regular here if its rules contain themselves at most at their ends, as `list ::= item | item list`.
The automaton has one way through each text, while the expression may have many: `(a* a*)*` has one for each cut.
"""

from collections import defaultdict
from itertools import pairwise
from typing import NamedTuple

from vllm_mp.core.structured_output.gbnf.expressions import (
    ANY_CHARACTER,
    Alternatives,
    Characters,
    CodeRange,
    Expression,
    Literal,
    Reference,
    Repetition,
    Rules,
    Sequence,
)

_MAX_STATES = 500
"""States of an automaton that is not deterministic yet."""
_MAX_SETS = 64
"""States of a deterministic automaton. A parser predicts all of them where the expression may begin."""
_MAX_MOVES = 4000
"""Product of the moves of a deterministic state and of the borders of their sets of characters."""
_MAX_DEPTH = 150
"""Nesting of expressions, across rules."""
_MAX_TOTAL = 20_000
"""States that are made for all expressions of a grammar."""
_MAX_STEPS = 1000
"""Steps of all deterministic automata of a grammar. A parser may have to predict all of them at the same place."""


class Step(NamedTuple):
    """A step from one state of a deterministic automaton to another."""

    source: int
    characters: Characters
    target: int


class Automaton(NamedTuple):
    """A deterministic automaton; the states are numbered from 0, where it begins."""

    steps: list[Step]
    ends: list[int]
    """The states in which a text may end."""


class _UnfitError(Exception):
    """An expression is not regular, or too large."""


class AutomatonMaker:
    """Makes the automata of expressions of one grammar."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._drafts: dict[Expression, _Draft | None] = {}
        self._num_left = _MAX_TOTAL
        self._num_steps_left = _MAX_STEPS

    def is_regular(self, expression: Expression) -> bool:
        """Return whether an expression is regular, and small enough."""
        return isinstance(expression, Literal | Characters) or self._draft(expression) is not None

    def has_loops(self, expression: Expression) -> bool:
        """Return whether an expression has repetitions without end, or may have them because it is not regular."""
        if isinstance(expression, Literal | Characters):
            return False
        draft = self._draft(expression)
        return draft is None or draft.num_loops > 0

    def ambiguous(self, expression: Expression) -> Automaton | None:
        """Return the automaton of a regular expression that may be ambiguous without bound.

        That takes two repetitions without end. None for other expressions, and if the automaton is too large or matches
        nothing. None, too, for a sequence that begins without a repetition: only the rest of it needs an automaton.
        """
        if isinstance(expression, Literal | Characters):
            return None
        if isinstance(expression, Sequence) and expression.items and not self.has_loops(expression.items[0]):
            return None
        draft = self._draft(expression)
        if draft is None or draft.num_loops < 2:
            return None
        try:
            automaton = draft.determinized()
        except _UnfitError:
            return None
        if len(automaton.steps) > self._num_steps_left:
            return None
        self._num_steps_left -= len(automaton.steps)
        return automaton

    def _draft(self, expression: Expression) -> "_Draft | None":
        if expression not in self._drafts:
            draft = _Draft(self._rules, min(_MAX_STATES, self._num_left))
            self._drafts[expression] = draft if draft.fit(expression) else None
            self._num_left -= draft.num_states
        return self._drafts[expression]


class _Draft:
    """An automaton with several possible steps from a state, and with steps that read nothing: Thompson's (1968)."""

    def __init__(self, rules: Rules, max_states: int) -> None:
        self.num_loops = 0
        """Repetitions without end. A rule that ends with itself counts twice: a parser keeps all of its beginnings."""
        self._rules = rules
        self._max_states = max_states
        self._steps: list[list[tuple[CodeRange, int]]] = []
        """By state, the steps that read a character."""
        self._jumps: list[list[int]] = []
        """By state, the steps that read nothing."""
        self._starts: dict[tuple[str, int], int] = {}
        """By rule and by the state after it, the state before it."""
        self._open: set[str] = set()
        """The rules within which the current expression is."""
        self._depth = 0
        self._start = self._end = -1

    @property
    def num_states(self) -> int:
        return len(self._jumps)

    def fit(self, expression: Expression) -> bool:
        """Match `expression`; return False if it is not regular, or too large."""
        try:
            self._end = self._state()
            self._start = self._before(expression, self._end)
        except _UnfitError:
            return False
        return True

    def determinized(self) -> Automaton:
        """Return a deterministic automaton for the same texts: the subset construction.

        Raises _UnfitError if it is too large or matches no text.
        """
        first = self._closure({self._start})
        numbers = {first: 0}
        pending = [first]
        steps: list[Step] = []
        while pending:
            states = pending.pop()
            for targets, ranges in self._moves(states).items():
                target = self._closure(targets)
                if target not in numbers:
                    if len(numbers) == _MAX_SETS:
                        raise _UnfitError
                    numbers[target] = len(numbers)
                    pending.append(target)
                steps.append(Step(numbers[states], Characters(tuple(ranges)), numbers[target]))
        ends = [number for states, number in numbers.items() if self._end in states]
        if not ends:
            raise _UnfitError
        return Automaton(steps, ends)

    def _before(self, expression: Expression, after: int) -> int:
        """Return a state from which a text of `expression` leads to the state `after`."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _UnfitError
        match expression:
            case Literal(text):
                for character in reversed(text):
                    after = self._state([((ord(character), ord(character)), after)])
            case Characters(ranges):
                after = self._state([(each, after) for each in _without_surrogates(ranges)])
            case Sequence(items):
                for item in reversed(items):
                    after = self._before(item, after)
            case Alternatives(options):
                start = self._state()
                for option in options:
                    self._jumps[start].append(self._before(option, after))
                after = start
            case Repetition(item, low, high):
                after = self._repeated(item, low, high, after)
            case Reference(rule):
                after = self._before_rule(rule, after)
        self._depth -= 1
        return after

    def _repeated(self, item: Expression, low: int, high: int | None, after: int) -> int:
        end = after
        if high is None:
            self.num_loops += 1
            after = self._state()
            self._jumps[after] += [end, self._before(item, after)]
        for _ in range(0 if high is None else high - low):
            start = self._state()
            self._jumps[start] += [end, self._before(item, after)]
            after = start
        for _ in range(low):
            start = self._state()
            self._jumps[start].append(self._before(item, after))
            after = start
        return after

    def _before_rule(self, rule: str, after: int) -> int:
        start = self._starts.get((rule, after))
        if start is not None:
            self.num_loops += 2 if rule in self._open else 0
            return start
        if rule in self._open:  # something follows the rule within itself
            raise _UnfitError
        start = self._starts[rule, after] = self._state()
        self._open.add(rule)
        self._jumps[start].append(self._before(self._rules[rule], after))
        self._open.remove(rule)
        return start

    def _state(self, steps: "list[tuple[CodeRange, int]] | None" = None) -> int:
        if len(self._jumps) >= self._max_states:
            raise _UnfitError
        self._steps.append(steps or [])
        self._jumps.append([])
        return len(self._jumps) - 1

    def _closure(self, states: "set[int] | frozenset[int]") -> frozenset[int]:
        """Return `states` with all that they reach without reading a character."""
        reached = set(states)
        pending = list(states)
        while pending:
            new = set(self._jumps[pending.pop()]) - reached
            reached |= new
            pending += new
        return frozenset(reached)

    def _moves(self, states: frozenset[int]) -> dict[frozenset[int], list[CodeRange]]:
        """Return where characters lead from `states`, with the characters that lead there."""
        steps = [step for state in states for step in self._steps[state]]
        borders = sorted({low for (low, _), _ in steps} | {high + 1 for (_, high), _ in steps})
        if len(steps) * len(borders) > _MAX_MOVES:
            raise _UnfitError
        moves: defaultdict[frozenset[int], list[CodeRange]] = defaultdict(list)
        for begin, end in pairwise(borders):
            targets = frozenset(target for (low, high), target in steps if low <= begin <= high)
            if targets:
                moves[targets].append((begin, end - 1))
        return moves


def _without_surrogates(ranges: tuple[CodeRange, ...]) -> list[CodeRange]:
    parts = [(max(low, first), min(high, last)) for low, high in ranges for first, last in ANY_CHARACTER.ranges]
    return [(low, high) for low, high in parts if low <= high]
