"""JSON schemas as llguidance takes them: annotations are left out, and what it would not hold is refused."""

import re
from collections.abc import Iterator
from typing import Any

from vllm_mp.core.structured_output.grammar import GrammarError

DEFINITIONS = ("$defs", "definitions")
ENFORCED_FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}
)
"""The formats that are enforced; any other is an annotation, as JSON Schema has it."""
_CONSTRAINING = frozenset(
    {
        *("$dynamicRef", "$recursiveRef", "$ref", "additionalItems", "additionalProperties", "allOf", "anyOf", "const"),
        *("contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "enum", "exclusiveMaximum"),
        *("exclusiveMinimum", "if", "items", "maxContains", "maxItems", "maxLength", "maxProperties", "maximum"),
        *("minContains", "minItems", "minLength", "minProperties", "minimum", "multipleOf", "not", "oneOf", "pattern"),
        *("patternProperties", "prefixItems", "properties", "propertyNames", "required", "then", "type"),
        *("unevaluatedItems", "unevaluatedProperties", "uniqueItems"),
    }
)
"""The keywords that constrain values, beside `format`. All others are annotations, also those that are not known."""
_SCHEMAS = frozenset(
    {
        *("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then"),
        *("unevaluatedItems", "unevaluatedProperties"),
    }
)
_LISTS = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
_NAMED = frozenset({*DEFINITIONS, "dependentSchemas", "patternProperties", "properties"})
_MAX_REFERENCES = 128
"""Number of different references up to which a schema is searched for values that never end."""
_NO_AUTOMATON = re.compile(r"\(\?<?[=!]|\\[1-9]")
"""Parts of regular expressions that no automaton has: look-around and references to groups."""
_URI_REFERENCE = re.compile(
    r"(?:[a-z][a-z0-9+.-]*:|(?![^/?#]*:))(?:[\w.~:/?@!$&'()*+,;=-]|%[0-9a-f]{2})*#?", re.ASCII | re.IGNORECASE
)
"""A URI reference of RFC 3986 with no fragment, which an `$id` must not have."""
_MAX_FORMAT = 100
"""Maximum length of the name of a format in the log."""


def subschemas(schema: Any, path: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    """Return (path as a JSON pointer, schema) of a schema and of all schemas in it, also in definitions."""
    pending = [(path, schema)]
    while pending:
        path, schema = pending.pop()
        if not isinstance(schema, dict):
            continue
        yield path, schema
        for key, value in schema.items():
            if isinstance(value, dict) and key in _NAMED:
                pending += [(f"{path}/{key}/{pointer(name)}", each) for name, each in value.items()]
            elif isinstance(value, dict) and key in _SCHEMAS:
                pending.append((f"{path}/{key}", value))
            elif isinstance(value, list) and key in _LISTS:
                pending += [(f"{path}/{key}/{index}", each) for index, each in enumerate(value)]


def keywords_of(schema: dict[str, Any]) -> set[str]:
    """Return the keywords of a schema that constrain its values, without `format`."""
    return set(_CONSTRAINING.intersection(schema))


def pointer(name: str) -> str:
    """Return a name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def drop_annotations(schema: dict[str, Any]) -> list[str]:
    """Remove formats that are annotations from a schema and all schemas in it; return a line about those of texts."""
    dropped = set()
    for _, part in subschemas(schema):
        name = part.get("format")
        if not isinstance(name, str) or name in ENFORCED_FORMATS:
            continue
        del part["format"]
        types = part.get("type", "string")
        if "string" in (types if isinstance(types, list) else [types]):
            dropped.add(repr(name[:_MAX_FORMAT]))
    if not dropped:
        return []
    return [f"format {', '.join(sorted(dropped))} of a JSON schema is an annotation: it constrains nothing"]


def drop_titles(schema: dict[str, Any]) -> None:
    """Remove each `$id` that is no URI, but a title such as "Output Format": llguidance would refuse the schema.

    No `$ref` can refer to it.
    """
    for _, part in subschemas(schema):
        name = part.get("$id")
        if isinstance(name, str) and not _URI_REFERENCE.fullmatch(name):
            del part["$id"]


def drop_unheld(schema: dict[str, Any]) -> None:
    """Remove from `schema` what `check_held` and the compilation of patterns would refuse, if less can be held."""
    for _, part in subschemas(schema):
        part.pop("minProperties", None)
        pattern = part.get("pattern")
        if isinstance(pattern, str) and _NO_AUTOMATON.search(pattern):
            del part["pattern"]


def check_held(schema: dict[str, Any]) -> None:
    """Raise GrammarError, which names the path, if llguidance would not hold a part of a schema that it accepts."""
    ending: set[str] = set()
    for path, part in subschemas(schema):
        _check_min_properties(part, path)
        _check_reference(schema, part, path, ending)
    references = {part["$ref"] for _, part in subschemas(schema) if isinstance(part.get("$ref"), str)}
    if len(references) <= _MAX_REFERENCES and not _ends(schema, _ending_references(schema, references)):
        raise GrammarError(
            "at #: no value of the schema ends, because a required part of it needs the schema again; leave the part "
            "out of required, or let it be null"
        )


def _check_min_properties(schema: dict[str, Any], path: str) -> None:
    """Refuse a least number of properties that repeated keys could reach."""
    least = schema.get("minProperties", 0)
    required = schema.get("required", [])
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if is_closed or not isinstance(least, int | float) or not isinstance(required, list):
        return
    # A required property occurs once, so any other member differs from all of them, but two others may have one key.
    if least > len({name for name in required if isinstance(name, str)}) + 1:
        raise GrammarError(
            f"at {path}/minProperties: Unable to count the properties, because keys that are not named may occur "
            "twice; name more properties in required, or set additionalProperties to false"
        )


def _ending_references(root: Any, references: set[str]) -> set[str]:
    """Return the references to schemas that have a value which ends."""
    ending: set[str] = set()
    while more := {each for each in references - ending if _ends(resolve(root, each), ending)}:
        ending |= more
    return ending


def _ends(schema: Any, ending: set[str]) -> bool:
    """Return whether a schema has a value that ends, if the references `ending` are those that have one."""
    if not isinstance(schema, dict):
        return schema is not False
    if isinstance(reference := schema.get("$ref"), str) and reference not in ending:
        return False
    for key, needed in (("allOf", all), ("anyOf", any), ("oneOf", any)):
        members = schema.get(key)
        if isinstance(members, list) and members and not needed(_ends(member, ending) for member in members):
            return False
    required, properties = schema.get("required"), schema.get("properties")
    if schema.get("type") == "object" and isinstance(required, list) and isinstance(properties, dict):
        return all(_ends(properties[name], ending) for name in required if isinstance(name, str) and name in properties)
    if schema.get("type") == "array" and isinstance(least := schema.get("minItems"), int) and least > 0:
        prefix = schema.get("prefixItems")
        first = prefix[:least] if isinstance(prefix, list) else []
        return all(_ends(item, ending) for item in first) and (
            least <= len(first) or _ends(schema.get("items", True), ending)
        )
    return True


def _check_reference(root: dict[str, Any], schema: dict[str, Any], path: str, ending: set[str]) -> None:
    """Refuse a reference that leads back to itself without an object, a list or an alternative between.

    `ending` are references that are known to end; those of this schema are added.
    """
    seen: dict[str, None] = {}
    while isinstance(reference := schema.get("$ref"), str) and reference not in ending:
        if reference in seen:
            raise GrammarError(
                f"at {path}/$ref: {reference!r} leads back to itself, so that it says nothing; let a property or an "
                "item refer to it instead"
            )
        seen[reference] = None
        target = resolve(root, reference)
        if not isinstance(target, dict):
            break
        schema = target
    ending.update(seen)


def resolve(root: Any, reference: str) -> Any:
    """Return the part of a schema that a reference in it names; None if there is none, or if it is no JSON pointer."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    value = root
    for name in reference.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict):
            value = value.get(name)
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value
