"""Errors of llguidance, completed: the path in the JSON schema that they are about, and what to do."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from vllm_mp.core.structured_output.schema.json_schema import pointer
from vllm_mp.requests.structured_outputs import Constraint

_UNSUPPORTED_KEYS = re.compile(r"Unimplemented keys: \[(.*?)\]")
_WRONG_TYPE = re.compile(r"Invalid type: (.+)")
_MISSING = re.compile(r"Pointer '(.+)' does not exist")
_REGEX_SYNTAX = "use the syntax of Rust's crate regex, which has no look-around and no backreferences"
_REMEDIES = {
    "regex parse error": _REGEX_SYNTAX,
    "lookarounds not supported": _REGEX_SYNTAX,
    "is not present in a registry": "no other document is loaded: leave $schema out, or copy what $ref needs to $defs",
}
"""What to do, by a part of the library's error."""
_NAMED_VALUES = ("pattern", "$ref", "$schema")
"""The keywords whose value stands in an error about it."""
_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
_MAX_VALUES = 100_000
"""Maximum number of values of a schema that are looked at."""


def completed_error(message: str, constraint: Constraint) -> str:
    """Return `message` with a remedy, and with the JSON pointer of what it is about, as far as these are known."""
    remedy = next((remedy for sign, remedy in _REMEDIES.items() if sign in message), "")
    return f"{_with_path(message, constraint)}{'; ' if remedy else ''}{remedy}"


def _with_path(message: str, constraint: Constraint) -> str:
    if constraint.kind not in ("json", "structural_tag") or message.startswith("at #"):
        return message
    try:
        schema = json.loads(constraint.text)
    except (ValueError, RecursionError):
        return message
    if unsupported := _UNSUPPORTED_KEYS.search(message):
        keys = re.findall(r'"((?:[^"\\]|\\.)*)"', unsupported[1])
        path = _find(schema, lambda key, _: key in keys)
        message = f"unsupported keywords: {', '.join(map(repr, keys))}; leave them out"
    elif wrong := _WRONG_TYPE.search(message):
        path = _find(
            schema, lambda key, value: key == "type" and wrong[1] in (value if isinstance(value, list) else [value])
        )
        message = f"{wrong[1]!r:.100} is not a type; use {', '.join(_TYPES[:-1])} or {_TYPES[-1]}"
    elif missing := _MISSING.search(message):
        path = _find(schema, lambda key, value: key == "$ref" and value == f"#{missing[1]}")
        message = f"the schema has no {missing[1]!r:.100}; add it, or correct the reference"
    elif "oneOf" in message:
        path = _find(schema, lambda key, _: key == "oneOf")
    elif "format" in message:
        path = _find(schema, lambda key, value: key == "format" and isinstance(value, str) and value in message)
    else:
        path = _find(schema, lambda key, value: key in _NAMED_VALUES and isinstance(value, str) and value in message)
    return message if path is None else f"at {path}: {message}"


def _find(schema: Any, matches: Callable[[Any, Any], bool]) -> str | None:
    """Return the JSON pointer of the first member for which `matches` returns true of its key and its value."""
    for path, key, value in islice(_members(schema), _MAX_VALUES):
        if matches(key, value):
            return path
    return None


def _members(schema: Any) -> Iterator[tuple[str, Any, Any]]:
    """Return (JSON pointer, key, value) of the members of all objects and lists in `schema`, outer ones first."""
    level: list[tuple[str, Any]] = [("#", schema)]
    while level:
        deeper = []
        for path, container in level:
            for key, value in _items(container):
                member_path = f"{path}/{pointer(str(key))}"
                yield member_path, key, value
                if isinstance(value, dict | list):
                    deeper.append((member_path, value))
        level = deeper


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(container, dict):
        return container.items()
    return enumerate(container) if isinstance(container, list) else ()
