"""Structural tags, which mix free text and constrained parts, as grammars in Lark's notation.

Names and meanings are as in vLLM. Each part of a grammar is a terminal, whose text the lexer finds, or an expression of
rules. The lexer takes the longest text that a terminal matches, so terminals that follow one another are joined to one:
otherwise a regular expression before an end tag would consume the tag. Free text is lazy: it ends at the first trigger,
or at the first end tag.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from vllm_mp.core.structured_output.exact_tokenizer import SpecialTokens
from vllm_mp.core.structured_output.grammar import GrammarError
from vllm_mp.core.structured_output.lark import (
    Additions,
    ebnf_grammar,
    json_rule,
    literal,
    parse_json,
    regex_terminal,
)
from vllm_mp.requests.structured_outputs import MAX_NESTING, Constraint


class _Part(NamedTuple):
    """A part of a grammar."""

    text: str
    is_terminal: bool


class FormatError(GrammarError):
    """A format is not valid, or llguidance cannot express it; the message begins with its path."""


def structural_tag_grammar(constraint: Constraint, special_tokens: SpecialTokens, added: Additions) -> str:
    """Return the grammar of a structural tag. Raises GrammarError, with the path in the tag, if it has none."""
    tag = parse_json("the structural tag", constraint.text)
    builder = _Builder(constraint, special_tokens, added)
    try:
        if isinstance(tag, dict) and "structures" in tag:
            start = builder.build(_current_form(tag), "structures", ())
        elif isinstance(tag, dict) and isinstance(tag.get("format"), dict):
            start = builder.build(tag["format"], "format", ())
        else:
            raise FormatError("it must have `format`, or `structures` and `triggers`")
    except FormatError as error:
        raise FormatError(f"structural tag: {error}") from None
    return builder.grammar(start)


def _current_form(tag: dict[str, Any]) -> dict[str, Any]:
    """Return the format that the older form, with `structures` and `triggers`, stands for.

    Raises FormatError if `structures` is no list of objects.
    """
    structures = _list_of(tag, "structures", dict, "structural tag")
    return {
        "type": "triggered_tags",
        "triggers": tag.get("triggers"),
        "tags": [
            {
                "type": "tag",
                "begin": structure.get("begin"),
                "content": {"type": "json_schema", "json_schema": structure.get("schema", {})},
                "end": structure.get("end"),
            }
            for structure in structures
        ],
    }


class _Builder:
    """Collects the rules of a grammar."""

    def __init__(self, constraint: Constraint, special_tokens: SpecialTokens, added: Additions) -> None:
        self._constraint = constraint
        self._special_tokens = special_tokens
        self._added = added
        self._rules = added.rules
        self._side_grammars: list[dict[str, str]] = []
        self._json_rules: dict[bytes, str] = {}
        """Names of rules by their schemas: the calls of a tool may stand in several places."""
        self._depth = 0

    def grammar(self, start: list[_Part]) -> str:
        """Return the grammar whose output matches the parts `start`."""
        text = "\n".join([f"start: {self._sequence(start)}", *self._rules]) + "\n"
        if not self._side_grammars:
            return text
        grammars = [{"lark_grammar": text}, *self._side_grammars]
        return msgspec.json.encode({"grammars": grammars}).decode()

    def build(self, format: Any, path: str, ends: Sequence[str]) -> list[_Part]:
        """Return the parts of a format, followed by one of the texts `ends` if there are any."""
        if not isinstance(format, dict) or not isinstance(format.get("type"), str):
            raise FormatError(f"{path} must be an object with `type`, got {str(format)[:100]}")
        method = getattr(self, f"_build_{format['type']}", None)
        if method is None:
            types = [name.removeprefix("_build_") for name in dir(self) if name.startswith("_build_")]
            raise FormatError(f"{path}: the type {format['type']!r} is not served; use one of {', '.join(types)}")
        if self._depth >= MAX_NESTING:
            raise FormatError(f"{path}: formats are nested deeper than {MAX_NESTING} levels")
        self._depth += 1
        try:
            parts: list[_Part] = method(format, path, ends)
        finally:
            self._depth -= 1
        return parts

    def _build_const_string(self, format: dict[str, Any], path: str, ends: Sequence[str]) -> list[_Part]:
        return [*self._text(_string_of(format, "value", path)), *self._ends(ends)]

    def _build_json_schema(self, format: dict[str, Any], path: str, ends: Sequence[str]) -> list[_Part]:
        if format.get("style", "json") != "json" or format.get("any_order") or format.get("excludes"):
            raise FormatError(f"{path}: `style`, `any_order` and `excludes` of JSON are not served; leave them out")
        is_lenient = bool(format.get("lenient"))
        key = msgspec.json.encode([format.get("json_schema"), format.get("max_whitespace_cnt"), is_lenient])
        if key in self._json_rules:
            return [_Part(self._json_rules[key], False), *self._ends(ends)]
        constraint = self._constraint
        if (most := format.get("max_whitespace_cnt")) is not None:
            constraint = msgspec.structs.replace(constraint, whitespace_pattern=rf"[ \t\n\r]{{0,{int(most)}}}")
        try:
            rule = json_rule(format.get("json_schema"), constraint, self._added, is_lenient=is_lenient)
        except FormatError:
            raise
        except GrammarError as error:
            raise FormatError(f"{path}.json_schema: {error}") from None
        name = self._json_rules[key] = f"json{len(self._json_rules)}"
        self._rules.append(f"{name}: {rule}")
        return [_Part(name, False), *self._ends(ends)]

    def _build_regex(self, format: dict[str, Any], path: str, ends: Sequence[str]) -> list[_Part]:
        if format.get("excludes"):
            raise FormatError(f"{path}: `excludes` of a regex is not served; leave it out")
        return [_Part(regex_terminal(_string_of(format, "pattern", path)), True), *self._ends(ends)]

    def _build_grammar(self, format: dict[str, Any], path: str, ends: Sequence[str]) -> list[_Part]:
        name = f"grammar{len(self._side_grammars)}"
        try:
            text = ebnf_grammar(_string_of(format, "grammar", path), self._special_tokens)
        except FormatError:
            raise
        except GrammarError as error:
            raise FormatError(f"{path}.grammar: {error}") from None
        self._side_grammars.append({"name": name, "lark_grammar": text})
        return [_Part(f"@{name}", False), *self._ends(ends)]

    def _build_any_text(self, format: dict[str, Any], path: str, ends: Sequence[str]) -> list[_Part]:
        if format.get("max_tokens") is not None:
            raise FormatError(f"{path}: `max_tokens` of a text is not served; use `max_chars`")
        excluded = _strings_of(format, "excludes", path, may_lack=True)
        return [_Part(self._free_text(excluded, format.get("max_chars"), ends), False)]

    def _build_token(self, format: dict[str, Any], path: str, ends: Sequence[str]) -> list[_Part]:
        return [self._token(format.get("token"), path), *self._ends(ends)]

    def _build_sequence(self, format: dict[str, Any], path: str, ends: Sequence[str]) -> list[_Part]:
        elements = _list_of(format, "elements", dict, path)
        parts: list[_Part] = []
        for index, element in enumerate(elements):
            is_last = index == len(elements) - 1
            parts += self.build(element, f"{path}.elements[{index}]", ends if is_last else ())
        return parts

    def _build_or(self, format: dict[str, Any], path: str, ends: Sequence[str]) -> list[_Part]:
        elements = _list_of(format, "elements", dict, path)
        built = [self.build(element, f"{path}.elements[{index}]", ends) for index, element in enumerate(elements)]
        return [self._alternatives(built)]

    def _build_optional(self, format: dict[str, Any], path: str, ends: Sequence[str]) -> list[_Part]:
        return self._repeated(format, path, "?", ends)

    def _build_plus(self, format: dict[str, Any], path: str, ends: Sequence[str]) -> list[_Part]:
        return self._repeated(format, path, "+", ends)

    def _build_star(self, format: dict[str, Any], path: str, ends: Sequence[str]) -> list[_Part]:
        return self._repeated(format, path, "*", ends)

    def _build_repeat(self, format: dict[str, Any], path: str, ends: Sequence[str]) -> list[_Part]:
        least, most = format.get("min"), format.get("max")
        if not isinstance(least, int) or not isinstance(most, int) or least < 0:
            raise FormatError(f"{path}: `min` and `max` must be integers, got {least!r} and {most!r}")
        return self._repeated(format, path, f"{{{least},{'' if most < 0 else most}}}", ends)

    def _build_tag(self, format: dict[str, Any], path: str, ends: Sequence[str]) -> list[_Part]:
        return [*self._begin(format, path), *self._after_begin(format, path), *self._ends(ends)]

    def _build_tags_with_separator(self, format: dict[str, Any], path: str, ends: Sequence[str]) -> list[_Part]:
        tags = _list_of(format, "tags", dict, path)
        tag = self._alternatives(
            [self._build_tag(tag, f"{path}.tags[{index}]", ()) for index, tag in enumerate(tags)]
        ).text
        text = f"({tag})"
        if not format.get("stop_after_first"):
            separator = self._text(_string_of(format, "separator", path))
            text = f"({tag} ({self._sequence([*separator, _Part(tag, False)])})*)"
        if not format.get("at_least_one"):
            text += "?"
        return [_Part(text, False), *self._ends(ends)]

    def _build_triggered_tags(self, format: dict[str, Any], path: str, ends: Sequence[str]) -> list[_Part]:
        triggers = _strings_of(format, "triggers", path)
        tags = _list_of(format, "tags", dict, path)
        excluded = _strings_of(format, "excludes", path, may_lack=True)
        rests: dict[str, list[list[_Part]]] = {}
        whole = []
        for index, tag in enumerate(tags):
            tag_path = f"{path}.tags[{index}]"
            begin = _string_of(tag, "begin", tag_path)
            matching = [trigger for trigger in triggers if begin.startswith(trigger)]
            if len(matching) != 1:
                raise FormatError(f"{tag_path}.begin must start with exactly one trigger, got {begin!r}")
            body = self._after_begin(tag, tag_path)
            rests.setdefault(matching[0], []).append([*self._text(begin[len(matching[0]) :]), *body])
            whole.append([*self._text(begin), *body])
        first = self._alternatives(whole)
        if format.get("at_least_one") and format.get("stop_after_first"):
            return [first, *self._ends(ends)]
        bodies = [(trigger, self._alternatives(parts)) for trigger, parts in rests.items()]
        text = self._dispatch(bodies, not format.get("stop_after_first"), excluded, ends)
        return [*([first] if format.get("at_least_one") else []), text]

    def _build_dispatch(self, format: dict[str, Any], path: str, ends: Sequence[str]) -> list[_Part]:
        rules = _list_of(format, "rules", list, path)
        excluded = _strings_of(format, "excludes", path, may_lack=True)
        bodies = []
        for index, rule in enumerate(rules):
            if len(rule) != 2 or not isinstance(rule[0], str) or not rule[0]:
                raise FormatError(f"{path}.rules[{index}] must be a text and a format, got {str(rule)[:100]}")
            bodies.append((rule[0], self._alternatives([self.build(rule[1], f"{path}.rules[{index}][1]", ())])))
        return [self._dispatch(bodies, bool(format.get("loop", True)), excluded, ends)]

    def _dispatch(
        self, bodies: list[tuple[str, _Part]], loops: bool, excluded: Sequence[str], ends: Sequence[str]
    ) -> _Part:
        """Return free text in which each text of `bodies` must be followed by its part."""
        heads = [f"{self._free_text(excluded, None, [trigger])} {body.text}" for trigger, body in bodies]
        tail = self._free_text([*excluded, *(trigger for trigger, _ in bodies)], None, ends)
        if loops:
            return _Part(f"({' | '.join(heads)})* {tail}", False)
        last = self._sequence(self._ends(ends))
        return _Part(f"({' | '.join(f'{head} {last}' for head in heads)} | {tail})", False)

    def _begin(self, tag: dict[str, Any], path: str) -> list[_Part]:
        begin = tag.get("begin")
        if isinstance(begin, dict):
            return [self._token(begin.get("token"), f"{path}.begin")]
        return self._text(_string_of(tag, "begin", path))

    def _after_begin(self, tag: dict[str, Any], path: str) -> list[_Part]:
        """Return the content and the end of a tag."""
        end = tag.get("end")
        if isinstance(end, dict):
            token = self._token(end.get("token"), f"{path}.end")
            return [*self.build(tag.get("content"), f"{path}.content", ()), token]
        ends = [end] if isinstance(end, str) else end
        if not isinstance(ends, list) or not ends or not all(isinstance(text, str) for text in ends):
            raise FormatError(f"{path}.end must be a text or a list of texts, got {str(end)[:100]}")
        return self.build(tag.get("content"), f"{path}.content", ends if any(ends) else ())

    def _repeated(self, format: dict[str, Any], path: str, suffix: str, ends: Sequence[str]) -> list[_Part]:
        content = self._alternatives([self.build(format.get("content"), f"{path}.content", ())])
        return [_Part(f"({content.text}){suffix}", content.is_terminal), *self._ends(ends)]

    def _free_text(self, excluded: Sequence[str], max_chars: int | None, ends: Sequence[str]) -> str:
        """Return the expression for any text without the `excluded` texts, until one of the texts `ends`."""
        text = "/(?s:.*)/" if max_chars is None else rf"/(?s:.{{0,{int(max_chars)}}})/"
        if excluded:
            text += f" & ~(/(?s:.*)/ ({' | '.join(map(literal, excluded))}) /(?s:.*)/)"
        terminal = f"TEXT{len(self._rules)}"
        self._rules.append(f"{terminal}: {text}")
        if not ends:
            return terminal
        alternatives = []
        for pieces in map(self._special_tokens.split, ends):
            # Free text cannot contain special tokens, so it stops before one by itself. Before ordinary text the
            # terminal must be lazy, or it would consume that text.
            if not pieces or isinstance(pieces[0], int):
                alternatives.append(self._sequence([_Part(terminal, False), *map(_piece, pieces)]))
                continue
            rule = f"text{len(self._rules)}"
            self._rules.append(f"{rule}[lazy]: {terminal} {literal(pieces[0])}")
            alternatives.append(self._sequence([_Part(rule, False), *map(_piece, pieces[1:])]))
        return f"({' | '.join(alternatives)})"

    def _ends(self, ends: Sequence[str]) -> list[_Part]:
        return [self._alternatives([self._text(end) for end in ends])] if ends else []

    def _text(self, text: str) -> list[_Part]:
        return [_piece(piece) for piece in self._special_tokens.split(text)]

    def _token(self, token: Any, path: str) -> _Part:
        if isinstance(token, int) and token >= 0:
            return _Part(f"<[{token}]>", False)
        pieces = self._special_tokens.split(token) if isinstance(token, str) else []
        if len(pieces) != 1 or not isinstance(pieces[0], int):
            raise FormatError(f"{path} must name a special token, got {token!r}")
        return _piece(pieces[0])

    def _alternatives(self, built: list[list[_Part]]) -> _Part:
        if not built:
            raise FormatError("a list of formats must not be empty")
        if all(part.is_terminal for parts in built for part in parts):
            texts = [" ".join(part.text for part in parts) or '""' for parts in built]
            return _Part(f"({' | '.join(texts)})", True)
        return _Part(f"({' | '.join(self._sequence(parts) for parts in built)})", False)

    def _sequence(self, parts: Sequence[_Part]) -> str:
        """Return an expression of rules for `parts`, with each run of terminals as one terminal."""
        texts = []
        run: list[str] = []
        for part in [*parts, _Part("", False)]:
            if part.is_terminal:
                run.append(part.text)
                continue
            if run:
                name = f"T{len(self._rules)}"
                self._rules.append(f"{name}: {' '.join(run)}")
                texts.append(name)
                run = []
            texts.append(part.text)
        return " ".join(text for text in texts if text) or '""'


def _piece(piece: str | int) -> _Part:
    """Return the part of a special token, by id, or of a text without special tokens."""
    return _Part(f"<[{piece}]>", False) if isinstance(piece, int) else _Part(literal(piece), True)


def _string_of(format: dict[str, Any], name: str, path: str) -> str:
    value = format.get(name)
    if not isinstance(value, str):
        raise FormatError(f"{path}.{name} must be a text, got {str(value)[:100]}")
    return value


def _list_of(format: dict[str, Any], name: str, kind: type, path: str) -> list[Any]:
    value = format.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(member, kind) for member in value):
        raise FormatError(f"{path}.{name} must be a list that is not empty, got {str(value)[:100]}")
    return value


def _strings_of(format: dict[str, Any], name: str, path: str, may_lack: bool = False) -> list[str]:
    if may_lack and not format.get(name):
        return []
    texts: list[str] = _list_of(format, name, str, path)
    if not all(texts):
        raise FormatError(f"{path}.{name} must hold no empty text")
    return texts
