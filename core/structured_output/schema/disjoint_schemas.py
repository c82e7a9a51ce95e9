"""Which types values of JSON have, and whether two schemas have no value in common."""

import json
from typing import Any

_EXAMPLES: tuple[Any, ...] = (None, True, 1, 0.5, "", [], {})
"""A value of each type."""


def are_disjoint(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Return whether no value can match both schemas, as far as that is seen without looking deep."""
    types = [
        {"number" if each == "integer" else each for each in (kind if isinstance(kind, list) else [kind])}
        if (kind := schema.get("type")) is not None
        else set().union(*map(types_of, _constants(schema) or [*_EXAMPLES])) - {"integer"}
        for schema in (first, second)
    ]
    if not types[0] & types[1]:
        return True
    constants = [_constants(schema) for schema in (first, second)]
    if all(constants):
        return _no_common(*constants)
    if first.get("type") != "object" or second.get("type") != "object":
        return False
    names = [set(schema.get("required", ())) & set(schema.get("properties", ())) for schema in (first, second)]
    for name in names[0] & names[1]:
        constants = [_constants(schema["properties"][name]) for schema in (first, second)]
        if all(constants) and _no_common(*constants):
            return True
    return False


def types_of(value: Any) -> set[str]:
    """Return the types that a value has."""
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number", "integer"} if value.is_integer() else {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
        case _:
            return {"object"}


def _constants(schema: Any) -> list[Any]:
    """Return the values that a schema lists; empty if it lists none."""
    if not isinstance(schema, dict):
        return []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else []


def _no_common(first: list[Any], second: list[Any]) -> bool:
    # 1 and 1.0 are equal in JSON.
    texts = [
        {
            json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value, sort_keys=True)
            for value in values
        }
        for values in (first, second)
    ]
    return not texts[0] & texts[1]
