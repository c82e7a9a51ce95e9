"""The place in a JSON schema that an error of a library is about."""

import json
import re
from typing import Any

from vllm_mp.structured_outputs import Constraint

_UNSUPPORTED_KEYS = re.compile(r"Unimplemented keys: \[(.*?)\]")
_MAX_VALUES = 100_000
"""Maximum number of values of a schema that are looked at."""


def with_place(message: str, constraint: Constraint) -> str:
    """Return `message` with the JSON pointer of what it is about, as far as that can be found."""
    if constraint.kind not in ("json", "structural_tag"):
        return message
    try:
        schema = json.loads(constraint.text)
    except (ValueError, RecursionError):
        return message
    if unsupported := _UNSUPPORTED_KEYS.search(message):
        keys = re.findall(r'"((?:[^"\\]|\\.)*)"', unsupported[1])
        place = _find(schema, lambda key, _: key in keys)
        message = f"unsupported keywords: {', '.join(map(repr, keys))}"
    elif "oneOf" in message:
        place = _find(schema, lambda key, _: key == "oneOf")
    elif "format" in message:
        place = _find(schema, lambda key, value: key == "format" and isinstance(value, str) and value in message)
    else:
        texts = ("pattern", "$ref")
        place = _find(schema, lambda key, value: key in texts and isinstance(value, str) and value in message)
    return message if place is None else f"at {place}: {message}"


def _find(schema: Any, matches: Any) -> str | None:
    """Return the JSON pointer of the first member for which `matches` returns true of its key and its value."""
    level: list[tuple[str, Any]] = [("#", schema)] if isinstance(schema, dict | list) else []
    num_values = 0
    while level and num_values < _MAX_VALUES:
        members = [
            (f"{place}/{str(key).replace('~', '~0').replace('/', '~1')}", key, value)
            for place, container in level
            for key, value in _members(container)
        ]
        for place, key, value in members:
            if matches(key, value):
                return place
        num_values += len(members)
        level = [(place, value) for place, _, value in members if isinstance(value, dict | list)]
    return None


def _members(container: Any) -> list[tuple[Any, Any]]:
    return list(container.items()) if isinstance(container, dict) else list(enumerate(container))
