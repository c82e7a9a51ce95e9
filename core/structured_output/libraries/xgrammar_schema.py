"""The JSON schemas that XGrammar enforces.

The library ignores keywords that it does not know, and many of those that it knows if they stand together or without
`type`. A schema that it would not hold in full is refused instead.
"""

from typing import Any

from vllm_mp.core.structured_output.grammar import GrammarError

_ANNOTATIONS = frozenset(
    {
        *("$schema", "$comment", "$defs", "definitions", "title", "description", "default", "examples", "example"),
        *("deprecated", "readOnly", "writeOnly", "contentEncoding", "contentMediaType", "contentSchema"),
    }
)
_NUMBER = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_KEYWORDS = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": _NUMBER,
    "number": _NUMBER,
    "boolean": frozenset[str](),
    "null": frozenset[str](),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
"""The keywords that are enforced beside `type`."""
_ALONE = ("$ref", "const", "enum", "anyOf")
"""Keywords of which one may stand without `type`, and with nothing but annotations."""
_END_OF_INT64 = 2**63
_FORMATS = frozenset({"date", "time", "date-time", "email", "hostname", "ipv4", "ipv6", "uuid"})


def check_schema(schema: Any, place: str = "#") -> None:
    """Raise GrammarError, with the place, if the library would not enforce a part of a JSON schema."""
    pending = [(place, schema)]
    while pending:
        place, schema = pending.pop()
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, dict):
            raise GrammarError(f"at {place}: a schema must be an object or a boolean")
        for name in ("$defs", "definitions"):
            if isinstance(definitions := schema.get(name), dict):
                pending += [(f"{place}/{name}/{key}", value) for key, value in definitions.items()]
        keywords = {key for key in schema if key not in _ANNOTATIONS and not key.startswith("x-")}
        if not keywords:
            continue
        alone = [key for key in _ALONE if key in keywords]
        if alone:
            allowed = frozenset({alone[0], "type"} if alone[0] in ("const", "enum") else {alone[0]})
        elif isinstance(schema.get("type"), str) and schema["type"] in _KEYWORDS:
            allowed = _KEYWORDS[schema["type"]] | {"type"}
        else:
            allowed = frozenset[str]()
        if unenforced := sorted(keywords - allowed):
            raise GrammarError(f"at {place}/{unenforced[0]}: xgrammar does not enforce {unenforced[0]!r} here")
        _check_values(schema, place)
        pending += _parts(schema, place)


def _check_values(schema: dict[str, Any], place: str) -> None:
    """Raise GrammarError if keywords that are enforced alone have values, or neighbours, with which they are not."""
    if not str(schema.get("$ref", "#")).startswith("#"):
        raise GrammarError(f"at {place}/$ref: xgrammar has no references to other documents")
    if schema.get("format", "date") not in _FORMATS:
        raise GrammarError(f"at {place}/format: xgrammar does not enforce the format {schema['format']!r}")
    _check_numbers(schema, place)
    if len({"pattern", "format"} & set(schema)) + bool({"minLength", "maxLength"} & set(schema)) > 1:
        raise GrammarError(f"at {place}: xgrammar enforces only one of pattern, format and the limits of the length")


def _check_numbers(schema: dict[str, Any], place: str) -> None:
    """Raise GrammarError for numbers that the library would round."""
    for key in ("const", "enum"):
        pending = [schema.get(key)]
        while pending:
            value = pending.pop()
            if isinstance(value, int) and not -_END_OF_INT64 <= value < _END_OF_INT64:
                raise GrammarError(f"at {place}/{key}: xgrammar keeps integers of 64 bits only, got {value}")
            pending += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if schema.get("type") == "number":
        for key in _NUMBER & set(schema):
            if isinstance(schema[key], int) and abs(schema[key]) > 2**53:
                raise GrammarError(f"at {place}/{key}: xgrammar keeps this bound of a number to 53 bits only")


def _parts(schema: dict[str, Any], place: str) -> list[tuple[str, Any]]:
    """Return the schemas in a schema, with their places."""
    parts = [(f"{place}/{name}", schema[name]) for name in ("items", "additionalProperties") if name in schema]
    if isinstance(properties := schema.get("properties"), dict):
        parts += [(f"{place}/properties/{name}", value) for name, value in properties.items()]
    for name in ("anyOf", "prefixItems"):
        if isinstance(members := schema.get(name), list):
            parts += [(f"{place}/{name}/{index}", value) for index, value in enumerate(members)]
    return parts
