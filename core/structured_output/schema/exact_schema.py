"""Rules for the parts of JSON schemas with numbers that llguidance would round.

The library keeps numbers as float64, so that bounds and values beyond 2**53 become others. A schema with such numbers
becomes rules in Lark's notation here, with numbers digit by digit.
"""

import itertools
import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from vllm_mp.core.structured_output.grammar import GrammarError
from vllm_mp.core.structured_output.schema.disjoint_schemas import are_disjoint, types_of
from vllm_mp.core.structured_output.schema.integer_range import integer_regex, number_regex
from vllm_mp.core.structured_output.schema.json_schema import keywords_of, pointer, resolve, subschemas

_MAX_EXACT = 2**53
_END_OF_INT64 = 2**63
_MAX_ONLY_BOUND = 10**18
_MAX_BOUND = 10**100
"""Bounds the size of a regular expression for numbers."""
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_NUMBERS = frozenset({*_BOUNDS, "multipleOf"})
_MAX_ONE_OF = 64
"""Number of schemas in oneOf that are compared with one another."""
_KEYWORDS_OF_TYPE = {
    "string": frozenset({"format", "maxLength", "minLength", "pattern"}),
    "integer": _NUMBERS,
    "number": _NUMBERS,
    "array": frozenset(
        {
            *("additionalItems", "contains", "items", "maxContains", "maxItems", "minContains", "minItems"),
            *("prefixItems", "unevaluatedItems", "uniqueItems"),
        }
    ),
    "object": frozenset(
        {
            *("additionalProperties", "dependencies", "dependentRequired", "dependentSchemas", "maxProperties"),
            *("minProperties", "patternProperties", "properties", "propertyNames", "required", "unevaluatedProperties"),
        }
    ),
}
"""The keywords that have no meaning for values of other types."""
_KEYWORDS_OF_TYPES = frozenset[str]().union(*_KEYWORDS_OF_TYPE.values())
_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
_KEY = r'/"([^"\\\x00-\x1f]|\\["\\bfnrt])*"/'
"""A key of an object. Other escapes are left out: they could spell the name of a property in another way."""


def has_rounded_numbers(schema: dict[str, Any]) -> bool:
    """Return whether a schema, or a schema in it, has numbers that the library would round."""
    return any(_rounds(part) for _, part in subschemas(schema))


class _Marks(NamedTuple):
    """The names of the terminals between the parts of JSON."""

    open: str
    close: str


class ExactSchema:
    """Builds the rules of a schema.

    Objects and lists always become rules of this class, because the lexer takes the longest text that a terminal
    matches: of two alternatives, one with the library's terminals and one with these, it could lose the former. The
    library's own expressions are used for strings, numbers and other single values.
    """

    def __init__(
        self, root: dict[str, Any], plain: Callable[[dict[str, Any]], str], whitespace: str, rules: list[str]
    ) -> None:
        """`plain` returns the library's expression of a schema for single values; `whitespace` is the terminal of what
        may stand between the parts of JSON, or empty. The rules are added to `rules`.
        """
        for path, part in subschemas(root):
            _check_shape(part, path)
        self._root = root
        self._plain = plain
        self._gap = whitespace
        self._rules = rules
        self._rule_of_reference: dict[str, str] = {}
        self._any_value = ""
        self._names: dict[str, str] = {}
        """The names of terminals and rules by their text: a rule that occurs again is not added again."""
        self._comma = self._terminal(f'{self._gap} "," {self._gap}')
        self._object = _Marks(self._terminal(f'"{{" {self._gap}'), self._terminal(f'{self._gap} "}}"'))
        self._array = _Marks(self._terminal(f'"[" {self._gap}'), self._terminal(f'{self._gap} "]"'))

    def expression(self) -> str:
        """Return the expression of the schema. Raises GrammarError, which names the path, if there is none."""
        return self._expression(self._root, "#")

    def _expression(self, schema: Any, path: str) -> str:
        if schema is True:
            return self._any()
        if not isinstance(schema, dict):
            raise GrammarError(f"at {path}: nothing matches the schema {schema!r}")
        keywords = keywords_of(schema)
        if not keywords and "format" not in schema:
            return self._any()
        if "$ref" in keywords:
            self._check(keywords, {"$ref"}, path)
            return self._reference(schema["$ref"], path)
        if "const" in keywords or "enum" in keywords:
            self._check(keywords, {"const" if "const" in keywords else "enum", "type"}, path)
            return self._values(schema, path)
        for name in ("anyOf", "oneOf", "allOf"):
            if name in keywords and schema[name]:
                self._check(keywords, {name}, path)
                if name == "allOf" and len(schema[name]) > 1:
                    raise self._lack(f"{path}/allOf", "allOf of several schemas")
                if name == "oneOf" and not self._are_disjoint(schema[name]):
                    raise self._lack(f"{path}/oneOf", "schemas in oneOf that are not disjoint by type or by a constant")
                parts = [self._expression(part, f"{path}/{name}/{i}") for i, part in enumerate(schema[name])]
                return f"({' | '.join(parts)})"
        types = schema.get("type", [each for each in _TYPES if each != "integer"])
        if not isinstance(types, list):
            return self._typed(schema, path)
        return f"({' | '.join(self._typed({**schema, 'type': kind}, path) for kind in types)})"

    def _any(self) -> str:
        """Return the rule for any value."""
        if not self._any_value:
            self._any_value = name = self._reserve()
            kinds = [kind for kind in _TYPES if kind != "integer"]
            self._set(name, " | ".join(self._typed({"type": kind}, "#") for kind in kinds))
        return self._any_value

    def _typed(self, schema: dict[str, Any], path: str) -> str:
        own = _KEYWORDS_OF_TYPE.get(schema["type"], frozenset())
        meant = own | (keywords_of(schema) - _KEYWORDS_OF_TYPES)
        schema = {key: value for key, value in schema.items() if key in meant}
        match schema["type"]:
            case "integer" | "number":
                return self._number(schema, path)
            case "object":
                return self._object_of(schema, path)
            case "array":
                return self._array_of(schema, path)
            case _:
                self._check(keywords_of(schema), {"type", *own}, path)
                return self._plain(schema)

    def _number(self, schema: dict[str, Any], path: str) -> str:
        is_integer = schema["type"] == "integer"
        self._check(keywords_of(schema), {"type", *_NUMBERS}, path)
        if not _rounds(schema):
            return self._plain(schema)
        if "multipleOf" in schema and not (is_integer and schema["multipleOf"] == 1):
            raise self._lack(f"{path}/multipleOf", "multipleOf")
        lows, highs = [], []
        for key in _BOUNDS:
            if key not in schema:
                continue
            value = schema[key]
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise GrammarError(f"at {path}/{key}: it must be a number, got {value!r}")
            is_exclusive = key.startswith("exclusive")
            if not is_integer and (is_exclusive or value != int(value)):
                raise self._lack(f"{path}/{key}", "a bound that is exclusive or no integer, for numbers of any type")
            if abs(value) >= _MAX_BOUND:
                raise self._lack(f"{path}/{key}", "bounds of more than 100 digits")
            if key.endswith("inimum"):
                lows.append(math.floor(value) + 1 if is_exclusive else math.ceil(value))
            else:
                highs.append(math.ceil(value) - 1 if is_exclusive else math.floor(value))
        low, high = max(lows, default=None), min(highs, default=None)
        if low is not None and high is not None and low > high:
            raise GrammarError(f"at {path}: no {schema['type']} is at least minimum and at most maximum")
        return self._terminal(f"/{integer_regex(low, high) if is_integer else number_regex(low, high)}/")

    def _values(self, schema: dict[str, Any], path: str) -> str:
        name = "const" if "const" in schema else "enum"
        values = [schema[name]] if name == "const" else schema[name]
        types = schema.get("type", list(_TYPES))
        allowed = [value for value in values if types_of(value) & set(types if isinstance(types, list) else [types])]
        if not allowed:
            raise GrammarError(f"at {path}/{name}: no value has the type {types}")
        return f"({' | '.join(map(self._constant, allowed))})"

    def _constant(self, value: Any) -> str:
        """Return the expression for a single value."""
        match value:
            case list():
                items = f" {self._comma} ".join(map(self._constant, value))
                return f"{self._array.open} {items} {self._array.close}"
            case dict():
                pairs = (f"{self._key(_literal(key))} {self._constant(value[key])}" for key in value)
                return f"{self._object.open} {f' {self._comma} '.join(pairs)} {self._object.close}"
            case int() | float() if _is_rounded(value):
                return self._terminal(_literal(value))
            case _:
                return self._plain({"const": value})

    def _reference(self, reference: str, path: str) -> str:
        if (target := resolve(self._root, reference)) is None:
            raise self._lack(f"{path}/$ref", f"the reference {reference!r:.100}, which names no part of the schema")
        if reference not in self._rule_of_reference:
            self._rule_of_reference[reference] = name = self._reserve()
            self._set(name, self._expression(target, reference))
        return self._rule_of_reference[reference]

    def _object_of(self, schema: dict[str, Any], path: str) -> str:
        keywords = keywords_of(schema)
        required = schema.get("required", [])
        properties = schema.get("properties", {})
        known = {"type", "properties", "required", "additionalProperties"}
        if schema.get("minProperties", 0) <= len(set(required)):
            known.add("minProperties")
        self._check(keywords, known, path)
        additional = schema.get("additionalProperties", True)
        members: list[tuple[str, bool]] = []
        names = [*properties, *(name for name in dict.fromkeys(required) if name not in properties)]
        for name in names:
            value = properties.get(name, additional)
            if value is False and name not in required:
                continue
            part = self._rule(self._expression(value, f"{path}/properties/{pointer(name)}"))
            members.append((f"{self._key(_literal(name))} {part}", name in required))
        if additional is not False:
            excluded = " | ".join(map(_literal, names))
            key = f"({_KEY} & ~({excluded}))" if excluded else _KEY
            value = self._rule(self._expression(additional, f"{path}/additionalProperties"))
            pair = f"{self._key(key)} {value}"
            members.append((f"{pair} ({self._comma} {pair})*", False))
        if not members:
            return f"{self._object.open} {self._object.close}"
        text, is_required = self._members(members)
        return f"{self._object.open} ({text}){'' if is_required else '?'} {self._object.close}"

    def _members(self, members: list[tuple[str, bool]]) -> tuple[str, bool]:
        """Return the expression of one or more `members` in their order, and whether one of them is required.

        A member is an expression, and whether it is required. Rules halve the list, because the library descends from
        rule to rule on its stack.
        """
        if len(members) == 1:
            return members[0]
        middle = len(members) // 2
        left, needs_left = self._members(members[:middle])
        right, needs_right = self._members(members[middle:])
        left, right = self._rule(left), self._rule(right)
        if needs_left and needs_right:
            return f"{left} {self._comma} {right}", True
        if needs_left:
            return f"{left} ({self._comma} {right})?", True
        if needs_right:
            return f"({left} {self._comma})? {right}", True
        return f"{left} ({self._comma} {right})? | {right}", False

    def _array_of(self, schema: dict[str, Any], path: str) -> str:
        keywords = keywords_of(schema)
        self._check(keywords, {"type", "items", "prefixItems", "minItems", "maxItems"}, path)
        prefix = schema.get("prefixItems", [])
        items = schema.get("items", True)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if isinstance(items, list):
            raise self._lack(f"{path}/items", "a list of items")
        if items is False:
            most = len(prefix) if most is None else min(most, len(prefix))
        if most is not None and most < least:
            raise GrammarError(f"at {path}: minItems is above maxItems")
        first = [
            self._rule(self._expression(part, f"{path}/prefixItems/{index}"))
            for index, part in enumerate(prefix[:most])
        ]
        tail = ""
        if most is None or most > len(first):
            item = self._rule(self._expression(items, f"{path}/items"))
            ends = (max(least - len(first), 0), None if most is None else most - len(first))
            tail = self._repeated(item, *ends, is_first=not first)
        if not first:
            return f"{self._array.open} {tail} {self._array.close}"
        options = [f"{self._all_of(first)} {tail}"]
        if least < len(first) > 1:
            options.append(self._first_of(first[:-1], max(least, 1)))
        end = "" if least else "?"
        return f"{self._array.open} ({' | '.join(options)}){end} {self._array.close}"

    def _all_of(self, items: list[str]) -> str:
        """Return the rule for all `items`, with commas between."""
        if len(items) == 1:
            return items[0]
        middle = len(items) // 2
        return self._rule(f"{self._all_of(items[:middle])} {self._comma} {self._all_of(items[middle:])}")

    def _first_of(self, items: list[str], least: int) -> str:
        """Return the rule for the first `least` or more of `items`; `least` is at least 1."""
        if least >= len(items):
            return self._all_of(items)
        middle = len(items) // 2
        text = f"{self._all_of(items[:middle])} {self._comma} {self._first_of(items[middle:], max(least - middle, 1))}"
        return self._rule(text if least > middle else f"{text} | {self._first_of(items[:middle], least)}")

    def _repeated(self, item: str, least: int, most: int | None, is_first: bool) -> str:
        """Return `least` to `most` items, each after a comma except for the first item of an array."""
        end = "" if most is None else most
        if not is_first:
            return f"({self._comma} {item}){{{least},{end}}}"
        rest = f"({self._comma} {item}){{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        return f"{item} {rest}" if least else f"({item} {rest})?"

    def _are_disjoint(self, schemas: list[Any]) -> bool:
        """Return whether no value matches two schemas, as their types or the constants of a property show."""
        if len(schemas) > _MAX_ONE_OF:
            return False
        whole = [self._resolved(schema) for schema in schemas]
        return all(are_disjoint(first, second) for first, second in itertools.combinations(whole, 2))

    def _resolved(self, schema: Any) -> dict[str, Any]:
        for _ in range(_MAX_ONE_OF):  # a chain of references ends, as was checked, but may be long
            if not isinstance(schema, dict) or keywords_of(schema) != {"$ref"}:
                break
            schema = resolve(self._root, schema["$ref"])
        return schema if isinstance(schema, dict) else {}

    def _key(self, text: str) -> str:
        """Return the terminal of a key with its colon."""
        return self._terminal(f'{text} {self._gap} ":" {self._gap}')

    def _terminal(self, text: str) -> str:
        text = text.strip()
        if text not in self._names:
            self._names[text] = name = f"EXACT{len(self._rules)}"
            self._rules.append(f"{name}: {text}")
        return self._names[text]

    def _rule(self, text: str) -> str:
        if text not in self._names:
            self._names[text] = name = self._reserve()
            self._set(name, text)
        return self._names[text]

    def _reserve(self) -> str:
        self._rules.append("")
        return f"exact{len(self._rules) - 1}"

    def _set(self, name: str, text: str) -> None:
        self._rules[int(name.removeprefix("exact"))] = f"{name}: {text}"

    def _check(self, keywords: set[str], known: set[str], path: str) -> None:
        if others := sorted(keywords - known):
            raise self._lack(f"{path}/{others[0]}", f"{others[0]!r} beside them")

    @staticmethod
    def _lack(path: str, what: str) -> GrammarError:
        return GrammarError(f"at {path}: Unable to hold numbers beyond 2**53 exactly with {what}; use smaller numbers")


def _literal(value: Any) -> str:
    """Return the JSON of a value as a string of a grammar."""
    return json.dumps(json.dumps(value, ensure_ascii=False))


def _check_shape(schema: dict[str, Any], path: str) -> None:
    """Raise GrammarError, which names the path, if a keyword has a value that JSON Schema does not allow."""
    for key, value in schema.items():
        match key:
            case "$ref":
                is_valid = isinstance(value, str)
            case "type":
                kinds = value if isinstance(value, list) else [value]
                is_valid = bool(kinds) and all(isinstance(kind, str) and kind in _TYPES for kind in kinds)
            case "required":
                is_valid = isinstance(value, list) and all(isinstance(name, str) for name in value)
            case "properties":
                is_valid = isinstance(value, dict)
            case "enum" | "prefixItems" | "anyOf" | "oneOf" | "allOf":
                is_valid = isinstance(value, list)
            case "minItems" | "maxItems" | "minProperties":
                is_valid = type(value) is int and value >= 0
            case _:
                continue
        if not is_valid:
            raise GrammarError(f"at {path}/{key}: it cannot be {json.dumps(value):.100}")


def _rounds(schema: dict[str, Any]) -> bool:
    """Return whether the keywords of a schema, without the schemas in it, have numbers that the library would round."""
    return any(key in schema and _is_rounded_bound(key, schema[key], schema.get("type")) for key in _BOUNDS) or any(
        key in schema and _has_rounded(schema[key]) for key in ("const", "enum")
    )


def _is_rounded_bound(key: str, value: Any, kind: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) < _MAX_EXACT:
        return False
    if (key, value, kind) == ("maximum", _END_OF_INT64 - 1, "integer"):
        return False
    # An exclusive bound becomes an inclusive one in float64. A bound of -2**63 or below crashes the library, and it
    # refuses an only bound of 19 digits. Bounds of numbers that may have a fraction are not kept to beyond 2**53.
    if kind != "integer" or key.startswith("exclusive") or abs(value) >= _END_OF_INT64 or value != float(value):
        return True
    return (value if key == "minimum" else -value) >= _MAX_ONLY_BOUND


def _is_rounded(value: Any) -> bool:
    """Return whether a number is another in the library, which keeps integers beyond int64 as float64 as well."""
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) < _MAX_EXACT:
        return False
    return abs(value) >= _END_OF_INT64 or value != float(value)


def _has_rounded(value: Any) -> bool:
    """Return whether there is such a number in a value of JSON."""
    pending = [value]
    while pending:
        value = pending.pop()
        if _is_rounded(value):
            return True
        pending += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return False
