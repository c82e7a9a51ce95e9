"""Constraints as grammars in Lark's notation, which llguidance compiles."""

import dataclasses
import json
import re
from typing import Any

from vllm_mp.core.structured_output.exact_tokenizer import SpecialTokens
from vllm_mp.core.structured_output.gbnf import gbnf_to_lark, is_gbnf
from vllm_mp.core.structured_output.grammar import GrammarError
from vllm_mp.core.structured_output.schema.exact_schema import ExactSchema, has_rounded_numbers
from vllm_mp.core.structured_output.schema.json_schema import check_held, drop_annotations, drop_titles, drop_unheld
from vllm_mp.requests.structured_outputs import Constraint

_WHITESPACE = r" |( ?(\r?\n){1,2}[ \t]{0,32})"
"""The whitespace between the parts of JSON. Without a bound, a model may write whitespace until its tokens run out."""


@dataclasses.dataclass
class Additions:
    """What the JSON schemas of a constraint add to its grammar."""

    rules: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    """Lines for the log about what is not enforced."""


def lark_grammar(constraint: Constraint, special_tokens: SpecialTokens, added: Additions) -> str:
    """Return the grammar of a constraint that is no structural tag. Raises GrammarError if it has none."""
    match constraint.kind:
        case "json":
            rule = json_rule(parse_json("the JSON schema", constraint.text), constraint, added)
            return "\n".join([f"start: {rule}", *added.rules])
        case "json_object":
            return "start: " + json_rule({"type": "object"}, constraint, added)
        case "regex":
            return f"start: {regex_terminal(constraint.text)}"
        case "choice":
            # The choices are one terminal, because a terminal for each would be slower by far.
            return f"start: CHOICE\nCHOICE: {' | '.join(literal(text) for text in _choices(constraint.text))}"
        case "grammar":
            return ebnf_grammar(constraint.text, special_tokens)
        case kind:
            raise AssertionError(kind)


def literal(text: str) -> str:
    """Return `text` as a string of a grammar."""
    return json.dumps(text)


def regex_terminal(pattern: str) -> str:
    """Return a regular expression as a terminal."""
    # The notation ends an expression at the first slash that has no backslash before it, and at the end of a line.
    escaped = re.sub(r"\\(.)|([/\n\r])", _escape_in_regex, pattern, flags=re.DOTALL)
    return f"/{escaped}/"


def _escape_in_regex(match: re.Match[str]) -> str:
    names = {"\n": r"\n", "\r": r"\r", "/": r"\/"}
    character = match[1] or match[2]
    return names.get(character, match[0])


def json_rule(schema: Any, constraint: Constraint, added: Additions, *, is_lenient: bool = False) -> str:
    """Return the expression for JSON that matches a schema, with the options of `constraint`; `schema` is changed.

    With `is_lenient`, keywords and patterns that the grammar cannot hold are left out. Raises GrammarError, which names
    the path, if the output could not be held to the schema.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError(f"a JSON schema must be an object or true, got {str(schema)[:100]}: nothing matches it")
    if not constraint.additional_properties:
        _close(schema)
    added.notes += drop_annotations(schema)
    drop_titles(schema)
    if is_lenient:
        drop_unheld(schema)
    check_held(schema)
    options: dict[str, Any] = {"whitespace_flexible": constraint.any_whitespace}
    if is_lenient:
        options["lenient"] = True
    whitespace = constraint.whitespace_pattern or (_WHITESPACE if constraint.any_whitespace else "")
    if whitespace:
        options["whitespace_pattern"] = whitespace

    def plain_rule(schema: dict[str, Any]) -> str:
        return f"%json {json.dumps({'x-guidance': options, **schema})}"

    if not has_rounded_numbers(schema):
        return plain_rule(schema)
    terminal = regex_terminal(f"({whitespace})?") if whitespace else ""
    try:
        return ExactSchema(schema, plain_rule, terminal, added.rules).expression()
    except GrammarError:
        if not is_lenient:
            raise
        return plain_rule(schema)


def ebnf_grammar(text: str, special_tokens: SpecialTokens) -> str:
    """Return a grammar in the notation of Lark or GBNF in that of Lark, in which special tokens are ids.

    Raises GrammarError if it cannot be read.
    """
    return gbnf_to_lark(text) if is_gbnf(text) else special_tokens.numbered(text)


def parse_json(name: str, text: str | bool) -> Any:
    """Return the value of a JSON text. Raises GrammarError if it is none."""
    if isinstance(text, bool):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"{name} is no valid JSON: {error}") from error


def _choices(text: str) -> list[str]:
    choices = parse_json("the list of choices", text)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise GrammarError(f"a choice must be a JSON list of strings, got {text[:100]}")
    return choices


def _close(schema: Any) -> None:
    """Forbid properties that are not named, in all objects of `schema` that do not say whether they may have such."""
    pending = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pending += value.values()
            if isinstance(value.get("properties"), dict):
                value.setdefault("additionalProperties", False)
        elif isinstance(value, list):
            pending += value
