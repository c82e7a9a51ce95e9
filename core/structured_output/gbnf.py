"""Grammars in GBNF, the notation of llama.cpp, as grammars in Lark's notation.

llguidance's lexer takes the longest text that a terminal matches, so the terminals of the result match one character
each. Otherwise the expression `[a-z]+ "end"` would match nothing: its first part would consume the end, too.
"""

import re
from typing import NamedTuple

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
_ANY_CHARACTER = "/(?s:.)/"


def is_gbnf(text: str) -> bool:
    """Return whether a grammar defines a rule as GBNF does."""
    return re.search(r"^\s*[\w-]+\s*::=", text, re.MULTILINE) is not None


def gbnf_to_lark(text: str) -> str:
    """Return a grammar in GBNF in Lark's notation.

    Raises GrammarError, which names the rule and the line, if the grammar cannot be read.
    """
    return _Parser(text).lark()


class _Token(NamedTuple):
    kind: str
    """The name of the group of `_TOKEN` that matched; "end" at the end of the grammar."""
    text: str
    rule: str
    """The name of the rule that it is part of; empty before the first rule."""
    line: int


class _Parser:
    """Reads the rules of a grammar one after the other, and writes each in Lark's notation."""

    def __init__(self, text: str) -> None:
        self._tokens = _split(text)
        self._next = 0
        self._depth = 0
        self._names = {"root": "start"}
        """The names of rules in Lark's notation, which has other names than GBNF."""
        self._num_characters = 0
        """Number of characters in literals, with one for each class."""
        self._terminals: dict[str, str] = {}
        """The names of terminals by their regular expressions."""
        self._first_uses: dict[str, _Token] = {}
        """The first reference to each rule."""

    def lark(self) -> str:
        rules: dict[str, str] = {}
        while self._token.kind != "end":
            name = self._token
            if name.kind != "define":
                raise self._unexpected("an expression, | or a rule (`name ::=`)")
            if name.text in rules:
                raise _error(name, "the rule is defined twice; rename or join the definitions")
            self._next += 1
            rules[name.text] = f"{self._lark_name(name)}: {self._alternatives()}"
        for used, token in self._first_uses.items():
            if used not in rules:
                raise _error(token, f"the rule {used!r} is not defined; define it, or correct the name")
        if "root" not in rules:
            raise GrammarError("the grammar has no rule 'root', with which an output begins; add `root ::= …`")
        terminals = [f"{name}: {regex}" for regex, name in self._terminals.items()]
        return "\n".join([*rules.values(), *terminals])

    @property
    def _token(self) -> _Token:
        return self._tokens[self._next]

    def _takes(self, mark: str) -> bool:
        """Return whether a mark comes next, and go on behind it."""
        is_next = self._token.kind == "mark" and self._token.text == mark
        self._next += is_next
        return is_next

    def _alternatives(self) -> str:
        sequences = [self._sequence()]
        while self._takes("|"):
            sequences.append(self._sequence())
        return " | ".join(sequences)

    def _sequence(self) -> str:
        items = []
        while (item := self._item()) is not None:
            if self._token.kind == "repeat":
                item = f"({item}){self._repetition()}"
            items.append(item)
        return " ".join(items) or '""'

    def _item(self) -> str | None:
        """Return the next part of a sequence; None at its end."""
        token = self._token
        if self._takes("("):
            return self._group(token)
        if self._takes("."):
            return self._terminals_of(token, [_ANY_CHARACTER])
        if token.kind not in ("name", "literal", "class"):
            return None
        self._next += 1
        if token.kind == "name":
            self._first_uses.setdefault(token.text, token)
            return self._lark_name(token)
        if token.kind == "literal":
            codes = [self._code(match, token) for match in _CHARACTER.finditer(token.text)]
            return self._terminals_of(token, [rf"/\x{{{code:x}}}/" for code in codes])
        return self._terminals_of(token, [self._class(token)])

    def _group(self, start: _Token) -> str:
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise _error(start, f"groups are nested deeper than {MAX_NESTING} levels; make rules of some")
        text = self._alternatives()
        if not self._takes(")"):
            raise self._unexpected("an expression, | or )")
        self._depth -= 1
        return f"({text})"

    def _repetition(self) -> str:
        token = self._token
        self._next += 1
        counts = [int(number) for number in re.findall(r"\d+", token.text)]
        if counts != sorted(counts):
            raise _error(token, f"the first number of {token.text} must not exceed the second")
        return "".join(token.text.split())

    def _class(self, token: _Token) -> str:
        """Return the regular expression of a class of characters."""
        is_negated = token.text.startswith("^")
        matches = list(_CHARACTER.finditer(token.text, int(is_negated)))
        if not matches:
            if is_negated:
                return _ANY_CHARACTER
            raise _error(token, "the class [] contains no character; add some")
        ranges = []
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
            ranges.append(rf"\x{{{low:x}}}-\x{{{high:x}}}")
        return f"/[{'^' * is_negated}{''.join(ranges)}]/"

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

    def _lark_name(self, name: _Token) -> str:
        return self._names.setdefault(name.text, f"rule{len(self._names)}")

    def _terminals_of(self, token: _Token, regexes: list[str]) -> str:
        """Return the sequence of terminals that match the characters of a token. Equal ones are defined once."""
        self._num_characters += len(regexes)
        if self._num_characters > _MAX_CHARACTERS:
            raise _error(
                token,
                f"the grammar has more than {_MAX_CHARACTERS} characters in literals; use `choice` for a long list",
            )
        return " ".join(self._terminals.setdefault(regex, f"T{len(self._terminals)}") for regex in regexes) or '""'

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
