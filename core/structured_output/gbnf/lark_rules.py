"""Writes the rules of a grammar in Lark's notation.

llguidance's lexer takes the longest text that a terminal matches, so the terminals match one character each. Otherwise
the expression `[a-z]+ "end"` would match nothing: its first part would consume the end, too.

llguidance's parser follows all ways to split the text so far, and fails when there are too many. So a regular part of
the grammar gets the rules of its deterministic automaton, one for each state, such as `state1: T0 | state1 T1`. With
this left recursion, the parser's work for a character does not grow with the text; with right recursion it would.
"""

from collections import defaultdict
from itertools import groupby

from vllm_mp.core.structured_output.gbnf.automaton import Automaton, AutomatonMaker
from vllm_mp.core.structured_output.gbnf.expressions import (
    Alternatives,
    Characters,
    Expression,
    Literal,
    Reference,
    Repetition,
    Rules,
    Sequence,
    sequence,
)

_NO_CHARACTER = r"[^\x{0}-\x{10ffff}]"


def to_lark(rules: Rules) -> str:
    """Return a grammar in Lark's notation."""
    return _Writer(rules).text()


class _Writer:
    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._automata = AutomatonMaker(rules)
        self._names = {"root": "start"}
        """The names of rules in Lark's notation, which has other names than GBNF."""
        self._pending = ["root"]
        """The rules that are referred to and not written yet."""
        self._of_automata: dict[Expression, str | None] = {}
        """What matches the same as an expression, by the rules of its automaton; None: it has no automaton."""
        self._automaton_rules: list[str] = []
        self._terminals: dict[Characters, str] = {}
        """The names of terminals."""

    def text(self) -> str:
        rules = []
        while self._pending:
            rule = self._pending.pop()
            rules.append(f"{self._names[rule]}: {self._expression(self._rules[rule])}")
        terminals = [f"{name}: /{_regex(characters)}/" for characters, name in self._terminals.items()]
        return "\n".join([*rules, *self._automaton_rules, *terminals])

    def _expression(self, expression: Expression) -> str:
        """Return an expression as a part of a sequence."""
        if expression not in self._of_automata:
            automaton = self._automata.ambiguous(expression)
            self._of_automata[expression] = None if automaton is None else self._automaton(automaton)
        if (text := self._of_automata[expression]) is not None:
            return text
        match expression:
            case Literal(literal):
                characters = (Characters(((ord(character), ord(character)),)) for character in literal)
                return " ".join(map(self._terminal, characters)) or '""'
            case Characters():
                return self._terminal(expression)
            case Reference(rule):
                if rule not in self._names:
                    self._names[rule] = f"rule{len(self._names)}"
                    self._pending.append(rule)
                return self._names[rule]
            case Alternatives(options):
                return f"({' | '.join(map(self._expression, options))})"
            case Repetition(item, low, high):
                return f"({self._expression(item)}){_counts(low, high)}"
            case Sequence(items):
                return self._sequence(items)

    def _sequence(self, items: tuple[Expression, ...]) -> str:
        """Return a sequence; regular items beside each other may have one automaton.

        It begins with the first of them that has a loop. The parser predicts all states of an automaton where it may
        begin, so the literals that tell alternatives apart come before.
        """
        texts = []
        for is_regular, group in groupby(items, self._automata.is_regular):
            run = list(group)
            while is_regular and run and not self._automata.has_loops(run[0]):
                texts.append(self._expression(run.pop(0)))
            if is_regular and len(run) > 1 and tuple(run) != items:
                texts.append(self._expression(sequence(run)))
            else:
                texts += map(self._expression, run)
        return " ".join(texts) or '""'

    def _automaton(self, automaton: Automaton) -> str:
        """Write the rules of an automaton, one for each state; return the text that matches what it does."""
        prefix = f"state{len(self._automaton_rules)}_"
        entered = {step.target for step in automaton.steps}
        options: defaultdict[int, list[str]] = defaultdict(list)
        for source, characters, target in automaton.steps:
            terminal = self._terminal(characters)
            if source == 0:
                options[target].append(terminal)
            if source in entered:
                options[target].append(f"{prefix}{source} {terminal}")
        self._automaton_rules += [f"{prefix}{state}: {' | '.join(texts)}" for state, texts in options.items()]
        ends = [f"{prefix}{state}" for state in automaton.ends if state in entered]
        if 0 in automaton.ends:
            ends.append('""')
        return f"({' | '.join(ends)})"

    def _terminal(self, characters: Characters) -> str:
        return self._terminals.setdefault(characters, f"T{len(self._terminals)}")


def _counts(low: int, high: int | None) -> str:
    if high is None and low < 2:
        return "+" if low else "*"
    return f"{{{low},{'' if high is None else high}}}"


def _regex(characters: Characters) -> str:
    """Return the regular expression for one of `characters`."""
    ranges = (rf"\x{{{low:x}}}-\x{{{high:x}}}" for low, high in characters.ranges)
    return f"[{''.join(ranges)}]" if characters.ranges else _NO_CHARACTER
