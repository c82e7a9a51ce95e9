"""Reads grammars in GBNF."""

import re
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
    sequence,
)
from vllm_mp.core.structured_output.grammar import GrammarError
from vllm_mp.requests.structured_outputs import MAX_NESTING

_TOKEN = re.compile(
    r"""
    (?P<skipped>(?:\s|\#[^\n]*)+)
    | (?P<define>[\w-]+)\s*::=
    | (?P<name>[\w-]+)
    | "(?P<literal>(?:\\.|[^"\\])*)"
    | \[(?P<class>(?:\\.|[^\]\\])*)\]
    | (?P<repeat>[?*+]|\{\s*\d{1,9}\s*(?:,\s*(?:\d{1,9}\s*)?)?\})
    | (?P<mark>[()|.])
    """,
    re.VERBOSE | re.DOTALL,
)
_CHARACTER = re.compile(
    r"\\(?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})|(?P<escaped>.))|(?P<plain>.)",
    re.DOTALL,
)
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "0": "\0", "e": "\x1b"}
_SURROGATES = range(0xD800, 0xE000)
_MAX_CHARACTERS = 60_000
"""llguidance takes 65,525 symbols in a grammar; each alternative takes one, too."""
_REPETITIONS = {"?": (0, 1), "*": (0, None), "+": (1, None)}


def read_rules(text: str) -> Rules:
    """Return the rules of a grammar. Raises GrammarError, which names the rule and the line, if it cannot be read."""
    return _Parser(text).rules()


class _Token(NamedTuple):
    kind: str
    """The name of the group of `_TOKEN` that matched; "end" at the end of the grammar."""
    text: str
    rule: str
    """The name of the rule that it is part of; empty before the first rule."""
    line: int


class _Parser:
    """Reads the rules of a grammar one after the other."""

    def __init__(self, text: str) -> None:
        self._tokens = _split(text)
        self._next = 0
        self._depth = 0
        self._num_characters = 0
        """Number of characters in literals, with one for each class."""
        self._first_uses: dict[str, _Token] = {}
        """The first reference to each rule."""

    def rules(self) -> Rules:
        rules: Rules = {}
        while self._token.kind != "end":
            name = self._token
            if name.kind != "define":
                raise self._unexpected("an expression, | or a rule (`name ::=`)")
            if name.text in rules:
                raise _error(name, "the rule is defined twice; rename or join the definitions")
            self._next += 1
            rules[name.text] = self._alternatives()
        for used, token in self._first_uses.items():
            if used not in rules:
                raise _error(token, f"the rule {used!r} is not defined; define it, or correct the name")
        if "root" not in rules:
            raise GrammarError("the grammar has no rule 'root', with which an output begins; add `root ::= …`")
        return rules

    @property
    def _token(self) -> _Token:
        return self._tokens[self._next]

    def _takes(self, mark: str) -> bool:
        """Return whether a mark comes next, and go on behind it."""
        is_next = self._token.kind == "mark" and self._token.text == mark
        self._next += is_next
        return is_next

    def _alternatives(self) -> Expression:
        options = [self._sequence()]
        while self._takes("|"):
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Alternatives(tuple(options))

    def _sequence(self) -> Expression:
        items = []
        while (item := self._item()) is not None:
            items.append(self._repetition(item) if self._token.kind == "repeat" else item)
        return sequence(items)

    def _item(self) -> Expression | None:
        """Return the next part of a sequence; None at its end."""
        token = self._token
        if self._takes("("):
            return self._group(token)
        if self._takes("."):
            self._count(1, token)
            return ANY_CHARACTER
        if token.kind not in ("name", "literal", "class"):
            return None
        self._next += 1
        if token.kind == "name":
            self._first_uses.setdefault(token.text, token)
            return Reference(token.text)
        if token.kind == "literal":
            text = "".join(chr(self._code(match, token)) for match in _CHARACTER.finditer(token.text))
            self._count(len(text), token)
            return Literal(text)
        self._count(1, token)
        return self._class(token)

    def _group(self, start: _Token) -> Expression:
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise _error(start, f"groups are nested deeper than {MAX_NESTING} levels; make rules of some")
        expression = self._alternatives()
        if not self._takes(")"):
            raise self._unexpected("an expression, | or )")
        self._depth -= 1
        return expression

    def _repetition(self, item: Expression) -> Repetition:
        token = self._token
        self._next += 1
        if token.text in _REPETITIONS:
            return Repetition(item, *_REPETITIONS[token.text])
        counts = [int(number) for number in re.findall(r"\d+", token.text)]
        if counts != sorted(counts):
            raise _error(token, f"the first number of {token.text} must not exceed the second")
        is_open = len(counts) == 1 and "," in token.text
        return Repetition(item, counts[0], None if is_open else counts[-1])

    def _class(self, token: _Token) -> Characters:
        is_negated = token.text.startswith("^")
        matches = list(_CHARACTER.finditer(token.text, int(is_negated)))
        if not matches and not is_negated:
            raise _error(token, "the class [] contains no character; add some")
        ranges: list[CodeRange] = []
        index = 0
        while index < len(matches):
            low = high = self._code(matches[index], token)
            if index + 2 < len(matches) and matches[index + 1][0] == "-":
                high = self._code(matches[index + 2], token)
                if high < low:
                    raise _error(
                        token, f"the range {matches[index][0]}-{matches[index + 2][0]} is reversed; swap its ends"
                    )
                index += 2
            index += 1
            ranges.append((low, high))
        characters = Characters(tuple(ranges))
        return characters.complement() if is_negated else characters

    def _code(self, match: re.Match[str], token: _Token) -> int:
        """Return the code point of a character, which may be escaped."""
        if digits := match["x"] or match["u"] or match["U"]:
            code = int(digits, 16)
            if code in _SURROGATES or code > 0x10FFFF:
                raise _error(token, f"{match[0]} is no character; write one beyond \\uFFFF as \\U0001F600")
            return code
        character = match["plain"] or match["escaped"]
        if match["escaped"] and character.isalnum():
            if character not in _CONTROLS:
                known = ", ".join(f"\\{name}" for name in _CONTROLS)
                raise _error(
                    token, f"unknown escape {match[0]}; use one of {known}, \\x41, \\u0041, \\U00000041, or a class"
                )
            return ord(_CONTROLS[character])
        return ord(character)

    def _count(self, num_characters: int, token: _Token) -> None:
        """Add to the number of characters. Raises GrammarError if they are too many."""
        self._num_characters += num_characters
        if self._num_characters > _MAX_CHARACTERS:
            raise _error(
                token,
                f"the grammar has more than {_MAX_CHARACTERS} characters in literals; use `choice` for a long list",
            )

    def _unexpected(self, expected: str) -> GrammarError:
        return _error(self._token, f"expected {expected}, got {self._token.text[:40]!r}")


def _split(text: str) -> list[_Token]:
    """Return the tokens of a grammar, without whitespace and comments."""
    tokens = []
    rule, line, offset = "", 1, 0
    while offset < len(text):
        match = _TOKEN.match(text, offset)
        if match is None:
            raise _error(
                _Token("", "", rule, line),
                f"cannot read {text[offset : offset + 20]!r}; a literal must end with a quotation mark, a class of "
                "characters with ], and a repetition is ?, *, +, {3}, {3,} or {3,5}",
            )
        kind = match.lastgroup or ""
        if kind == "define":
            rule = match[kind]
        if kind != "skipped":
            tokens.append(_Token(kind, match[kind], rule, line))
        line += match[0].count("\n")
        offset = match.end()
    tokens.append(_Token("end", "the end of the grammar", rule, line))
    return tokens


def _error(token: _Token, reason: str) -> GrammarError:
    rule = f"rule {token.rule!r}, " if token.rule else ""
    return GrammarError(f"the grammar cannot be read as GBNF: {rule}line {token.line}: {reason}")
