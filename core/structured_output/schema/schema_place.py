"""The place in a JSON schema that an error of a library is about."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from vllm_mp.requests.structured_outputs import Constraint

_UNSUPPORTED_KEYS = re.compile(r"Unimplemented keys: \[(.*?)\]")
_MAX_VALUES = 100_000
"""Maximum number of values of a schema that are looked at."""


def with_place(message: str, constraint: Constraint) -> str:
    """Return `message` with the JSON pointer of what it is about, as far as that can be found."""
    if constraint.kind not in ("json", "structural_tag") or message.startswith("at #"):
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


def schema_members(schema: Any) -> Iterator[tuple[str, Any, Any]]:
    """Return (JSON pointer, key, value) of the members of all objects and lists in `schema`, outer ones first."""
    level: list[tuple[str, Any]] = [("#", schema)]
    while level:
        deeper = []
        for place, container in level:
            for key, value in _members(container):
                pointer = f"{place}/{str(key).replace('~', '~0').replace('/', '~1')}"
                yield pointer, key, value
                if isinstance(value, dict | list):
                    deeper.append((pointer, value))
        level = deeper


def _find(schema: Any, matches: Callable[[Any, Any], bool]) -> str | None:
    """Return the JSON pointer of the first member for which `matches` returns true of its key and its value."""
    for place, key, value in islice(schema_members(schema), _MAX_VALUES):
        if matches(key, value):
            return place
    return None


def _members(container: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(container, dict):
        return container.items()
    return enumerate(container) if isinstance(container, list) else ()
