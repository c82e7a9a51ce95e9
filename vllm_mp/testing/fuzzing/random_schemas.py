"""JSON schemas at the edges of what llguidance takes: numbers, formats, depth."""

import json
import random
from typing import Any, Final

_EDGES: Final = [0, 1, 2**31, 2**32, 2**53, 2**63, 2**64, 10**20, 10**30]
_FLOATS: Final = [0.1, 1e-9, 1e16, 9.3e18, 1e19, 1e300, 1.5]
_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_FORMATS: Final = [
    *("date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"),
    *("int32", "int64", "float", "double", "password", "binary", "byte", "path", "uri-reference", "regex", "unknown"),
]
_PATTERNS: Final = ["^[a-z]+$", "a{1,1000}", "(a|b)*c", r"\d{3}-\d{4}", "^(((a?){1,50}){1,50})$", "[^\\x00-\\x7f]", "("]


def random_schema(chance: random.Random, depth: int = 4) -> Any:
    """Return a schema with at most `depth` levels below it; not every schema is valid."""
    if depth <= 0:
        return _leaf(chance)
    choice = chance.random()
    if choice < 0.5:
        return _leaf(chance)
    if choice < 0.7:
        names = [f"p{number}" for number in range(chance.randrange(5))]
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: random_schema(chance, depth - 1) for name in names},
        }
        if chance.random() < 0.5:
            schema["required"] = [name for name in names if chance.random() < 0.6]
        if chance.random() < 0.4:
            schema["additionalProperties"] = chance.choice([False, True, random_schema(chance, depth - 1)])
        if chance.random() < 0.2:
            schema[chance.choice(["minProperties", "maxProperties"])] = chance.choice([0, 1, 3, 2**31])
        return schema
    if choice < 0.82:
        schema = {"type": "array", "items": random_schema(chance, depth - 1)}
        if chance.random() < 0.5:
            schema[chance.choice(["minItems", "maxItems"])] = chance.choice([0, 1, 2, 1000, 10**9, 2**63])
        return schema
    if choice < 0.94:
        count = chance.randrange(1, 4)
        return {chance.choice(["anyOf", "oneOf", "allOf"]): [random_schema(chance, depth - 1) for _ in range(count)]}
    if choice < 0.97:
        return {"$defs": {"x": random_schema(chance, depth - 1)}, "$ref": "#/$defs/x"}
    return _nested(chance.choice([8, 40, 64, 200]))


def random_schema_text(seed: int) -> str:
    """Return the schema number `seed` as JSON, the same each time."""
    return json.dumps(random_schema(random.Random(seed)))


def _leaf(chance: random.Random) -> Any:
    kind = chance.choice(["integer", "integer", "number", "number", "string", "string", "enum", "const", "other"])
    if kind in ("integer", "number"):
        schema: dict[str, Any] = {"type": kind}
        for bound in chance.sample(_BOUNDS, chance.randrange(3)):
            schema[bound] = _number(chance)
        if chance.random() < 0.2:
            schema["multipleOf"] = chance.choice([1, 2, 7, 0.1, 1e-9, 2**53, 0, -1])
        return schema
    if kind == "string":
        schema = {"type": "string"}
        if chance.random() < 0.5:
            schema["format"] = chance.choice(_FORMATS)
        if chance.random() < 0.3:
            schema["pattern"] = chance.choice(_PATTERNS)
        if chance.random() < 0.4:
            schema[chance.choice(["minLength", "maxLength"])] = chance.choice([0, 1, 20, 10**6, 2**63, -1])
        return schema
    if kind == "enum":
        return {"enum": [chance.choice([_number(chance), "text", None, True, [1], {"a": 1}]) for _ in range(3)]}
    if kind == "const":
        return {"const": chance.choice([_number(chance), "", "a\nb\u0000", "\U0001f600", None])}
    return chance.choice(
        [{}, True, {"type": ["integer", "null"]}, {"type": "null"}, {"not": {}}, {"type": "foo"}, False]
    )


def _number(chance: random.Random) -> int | float:
    if chance.random() < 0.3:
        return chance.choice(_FLOATS) * chance.choice([1, -1])
    return chance.choice([1, -1]) * chance.choice(_EDGES) + chance.randrange(-2, 3)


def _nested(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"n": schema}, "required": ["n"]}
    return schema
