"""What is special in JSON schemas: large numbers, annotations, counted properties, recursion, whitespace."""

import concurrent.futures
import decimal
import json
import logging
import pathlib
import threading
from typing import Annotated, Literal

import pydantic
import pytest

from vllm_mp.core.structured_output.grammar import GrammarError
from vllm_mp.requests.structured_outputs import Constraint

INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1, "format": "int64"}
UINT64 = {"type": "integer", "minimum": 0, "maximum": 2**64 - 1}
SERIAL = 1234567890123456789


def of(schema, **options):
    return Constraint("json", json.dumps(schema), **options)


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        (INT64, [-(2**63), 0, 2**63 - 1], [-(2**63) - 1, 2**63, 1.5]),
        (UINT64, [0, 2**63, 2**64 - 1], [-1, 2**64]),
        ({"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}, [-(2**63)], [-(2**63) + 1, -(2**63) - 1]),
        ({"type": "integer", "maximum": -(2**64)}, [-(2**64), -(10**30)], [-(2**64) + 1]),
        ({"type": "integer", "exclusiveMinimum": 2**53}, [2**53 + 1, 10**40], [2**53]),
        ({"type": "integer", "minimum": 2**62}, [2**62, 2**63], [2**62 - 1]),
        ({"type": "integer", "exclusiveMaximum": 2**53 + 1.0}, [2**53 - 1, -5], [2**53]),
        ({"type": "number", "minimum": 0, "maximum": 2**64}, [0.5, 2**64], [2**64 + 1, -0.5]),
        ({"type": ["integer", "null"], "maximum": SERIAL}, [SERIAL, None], [SERIAL + 1, "a"]),
        ({"maximum": SERIAL}, [SERIAL, None, "a", [1], {"a": 1}, True], [SERIAL + 1]),
        ({"const": SERIAL}, [SERIAL], [1234567890123456768]),
        ({"enum": ["a", SERIAL, -(2**63), 7, None]}, ["a", SERIAL, -(2**63), 7, None], [SERIAL + 1, 8, "b"]),
        ({"enum": ["a", SERIAL], "type": "integer"}, [SERIAL], ["a"]),
        ({"enum": [[SERIAL, {"a": {}}], []]}, [[SERIAL, {"a": {}}], []], [[SERIAL], [SERIAL + 1, {"a": {}}], {}]),
        ({"anyOf": [{"$ref": "#/$defs/id"}, {"type": "null"}], "$defs": {"id": INT64}}, [-(2**63), None], [2**63]),
        ({"allOf": [UINT64]}, [2**64 - 1], [2**64]),
        ({"oneOf": [INT64, {"type": "null"}, {"const": "a"}], "x-other": 1}, [-(2**63), None, "a"], [2**63, "b"]),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_integers_of_any_size_are_held_to_the_digit(library, schema, allowed, forbidden):
    assert [value for value in allowed if not library.allows(of(schema), json.dumps(value))] == []
    assert [value for value in forbidden if library.allows(of(schema), json.dumps(value))] == []


ACCOUNT = {
    "type": "object",
    "properties": {
        "id": INT64,
        "owner": {"type": "string"},
        "parent": {"anyOf": [{"$ref": "#/$defs/account"}, {"type": "null"}]},
        "log": {"type": "array", "prefixItems": [{"const": "v1"}], "items": UINT64, "minItems": 1, "maxItems": 3},
    },
    "required": ["id", "parent"],
    "additionalProperties": {"type": "array", "items": UINT64, "maxItems": 2},
}
TREE = {"$ref": "#/$defs/account", "$defs": {"account": ACCOUNT}}


@pytest.mark.parametrize("options", [{}, {"whitespace_pattern": " ?"}], ids=["default", "pattern"])
@pytest.mark.parametrize(
    "value",
    [
        {"id": -(2**63), "parent": None},
        {"id": 1, "owner": "a", "parent": {"id": 2**63 - 1, "parent": None}},
        {"id": 1, "parent": None, "log": ["v1"], "x": [2**64 - 1, 0], "y": []},
        {"id": 1, "parent": None, "log": ["v1", 2**63, 1]},
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_large_integers_are_held_deep_in_a_schema(library, value, options):
    assert library.allows(of(TREE, **options), json.dumps(value))


@pytest.mark.parametrize(
    "value",
    [
        {"id": 2**63, "parent": None},
        {"parent": None},
        {"id": 1, "parent": None, "log": []},
        {"id": 1, "parent": None, "log": ["v1", 1, 2, 3]},
        {"id": 1, "parent": None, "x": [2**64]},
        {"id": 1, "parent": None, "id ": 2},
        {"id": 1, "parent": {"id": 1}},
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_what_a_schema_with_large_integers_forbids_is_refused(library, value):
    assert not library.allows(of(TREE), json.dumps(value))


def test_kinds_of_objects_that_a_constant_tells_apart_may_have_large_integers(library):
    def kind(name):
        properties = {"kind": {"const": name, "type": "string"}, "id": INT64}
        return {"type": "object", "properties": properties, "required": ["kind"], "additionalProperties": False}

    schema = {
        "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        "discriminator": {"propertyName": "kind"},
        "$defs": {"cat": kind("cat"), "dog": kind("dog")},
    }
    assert library.allows(of(schema), f'{{"kind": "dog", "id": {2**63 - 1}}}')
    assert not library.allows(of(schema), f'{{"kind": "cat", "id": {2**63}}}')
    schema["$defs"]["dog"] = kind("cat")
    assert "at #/oneOf: Unable" in library.refusal(of(schema))


@pytest.mark.parametrize(
    "other",
    [
        {
            "type": "object",
            "properties": {"kind": {"const": "cat"}},
            "required": ["kind"],
            "additionalProperties": False,
        },
        {"type": "object", "required": ["kind"]},
        {},
    ],
    ids=str,
)
def test_alternative_without_large_integers_stays_possible(library, other):
    dog = {"type": "object", "properties": {"kind": {"const": "dog"}, "id": INT64}, "required": ["kind", "id"]}
    schema = {"type": "array", "items": {"anyOf": [dog, other]}}
    assert library.allows(
        of(schema), f'[{{"kind": "dog", "id": {2**63 - 1}}}, {{"kind": "cat"}}, {{ "kind" : "cat" }}]'
    )


@pytest.mark.parametrize("reference", ["#", "#/$defs/node", "#/properties/next"])
def test_recursive_schema_may_have_large_integers(library, reference):
    node = {"type": "object", "properties": {"id": INT64, "next": {"$ref": reference}}, "additionalProperties": False}
    schema = {**node, "$defs": {"node": node}}
    if reference == "#/properties/next":
        schema["properties"] = {**node["properties"], "next": node}
    value = {"id": 2**63 - 1, "next": {"next": {"id": -(2**63)}}}
    assert library.allows(of(schema), json.dumps(value))
    value["next"]["next"]["id"] = 2**63
    assert not library.allows(of(schema), json.dumps(value))


def test_part_beside_large_integers_may_refer_to_the_whole_schema(library):
    properties = {"id": INT64, "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}}, "up": {"$ref": "#"}}
    tag = {"type": "object", "properties": {"of": {"$ref": "#"}}, "additionalProperties": False}
    schema = {"type": "object", "properties": properties, "additionalProperties": False, "$defs": {"tag": tag}}
    assert library.allows(of(schema), '{"tags": [{"of": {"id": 1}}], "up": {"up": {}}}')
    assert not library.allows(of(schema), f'{{"tags": [{{"of": {{"id": {2**63}}}}}]}}')


def test_grammar_of_too_many_large_numbers_is_refused(library):
    parts = [{"type": "integer", "minimum": -SERIAL - number, "maximum": SERIAL} for number in range(7_000)]
    with pytest.raises(GrammarError, match="the constraint is too large: its grammar has "):
        library.compile(of({"type": "array", "prefixItems": parts}))


@pytest.mark.parametrize("kind", ["object", "array"])
def test_schema_with_many_parts_and_large_integers_needs_little_stack(library, kind):
    parts = [{"type": "integer", "minimum": SERIAL}] * 1500
    if kind == "object":
        names = [f"p{number}" for number in range(len(parts))]
        schema = {"type": "object", "properties": dict(zip(names, parts, strict=True)), "required": names[700:702]}
    else:
        schema = {"type": "array", "prefixItems": parts, "minItems": 2}
    value = {"p700": SERIAL, "p701": SERIAL} if kind == "object" else [SERIAL, SERIAL]
    before = threading.stack_size(2**21)
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            assert thread.submit(library.allows, of(schema), json.dumps(value)).result()
    finally:
        threading.stack_size(before)


def test_schema_with_large_integers_keeps_to_the_options_of_whitespace(library):
    compact = of(TREE, any_whitespace=False)
    assert library.allows(compact, '{"id":1,"parent":null}')
    assert not library.allows(compact, '{"id": 1,"parent":null}')
    assert library.allows(of(TREE), '{\n  "id": 1,\n  "parent": null\n}')
    assert not library.allows(of(TREE), '{"id":   1,"parent":null}')


def test_large_integers_are_held_in_structural_tags(library):
    tag = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": TREE}, "end": "</f>"}
    constraint = Constraint("structural_tag", json.dumps({"type": "structural_tag", "format": tag}))
    assert library.allows(constraint, f'<f>{{"id":{2**63 - 1},"parent":null}}</f>')
    assert not library.allows(constraint, f'<f>{{"id":{2**63},"parent":null}}</f>')


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"oneOf": [{"type": "integer", "minimum": SERIAL}, {"type": "number"}]}, "#/oneOf"),
        ({"allOf": [{"type": "integer", "minimum": SERIAL}, {"maximum": 2**64}]}, "#/allOf"),
        ({"type": "integer", "minimum": 2**53 + 1, "multipleOf": 3}, "#/multipleOf"),
        ({"type": "integer", "minimum": 2**64, "maximum": 0}, "#: no integer"),
        ({"type": "number", "minimum": 0.5, "maximum": 2**64}, "#/minimum"),
    ],
)
def test_large_number_that_cannot_be_held_is_refused_with_its_path(library, schema, path):
    assert library.refusal(of(schema)).startswith(f"at {path}")


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        ({"minProperties": 1}, ['{"k":1}'], ["{}"]),
        ({"minProperties": 2, "required": ["a"]}, ['{"a":1,"k":1}'], ['{"a":1}', '{"a":1,"a":2}']),
        ({"minProperties": 1, "maxProperties": 1}, ['{"k":1}'], ['{"k":1,"l":1}']),
    ],
)
def test_least_number_of_properties_counts_each_key_once(library, schema, allowed, forbidden):
    constraint = of({"type": "object", **schema})
    assert [text for text in allowed if not library.allows(constraint, text)] == []
    assert [text for text in forbidden if library.allows(constraint, text)] == []


@pytest.mark.parametrize(
    "schema",
    [
        {"minProperties": 2},
        {"minProperties": 3, "additionalProperties": {"type": "integer"}},
        {"minProperties": 2, "patternProperties": {"^k": {}}, "additionalProperties": False},
        {"minProperties": 3, "required": ["a"], "properties": {"b": {}}},
    ],
)
def test_least_number_that_repeated_keys_could_reach_is_refused(library, schema):
    constraint = of({"type": "array", "items": {"type": "object", **schema}})
    assert "at #/items/minProperties: Unable to count" in library.refusal(constraint)


@pytest.mark.parametrize(
    "schema",
    [
        *({"type": "string", "format": name} for name in ("password", "binary", "path", "decimal", "uri-reference")),
        {"type": "string", "format": "no such format", "minLength": 1},
        {"type": "string", "contentMediaType": "application/json", "contentSchema": {}, "contentEncoding": "base64"},
        {"type": "string", "format": "password", "writeOnly": True, "title": "A", "x-order": 3},
    ],
    ids=str,
)
def test_annotations_constrain_nothing(library, schema):
    constraint = of({"type": "object", "properties": {"format": schema}, "required": ["format"]})
    assert library.allows(constraint, '{"format": "any text"}')
    assert not library.allows(constraint, '{"format": 3}')


@pytest.mark.parametrize(
    "title", ["Output Format", "Person: v1", "100%", "Größe", "a[0]", "https://a.b/person", "p.json"]
)
def test_id_may_be_a_title_that_is_no_uri(library, title):
    number = {"$id": title + "2", "type": "integer"}
    constraint = of({"$id": title, "type": "array", "items": {"$ref": "#/$defs/n"}, "$defs": {"n": number}})
    assert library.allows(constraint, "[1]")
    assert not library.allows(constraint, '["a"]')


def test_reference_to_an_id_is_resolved(library):
    number = {"$id": "https://a.b/number", "type": "integer"}
    constraint = of({"$id": "https://a.b/list", "items": {"$ref": "number"}, "type": "array", "$defs": {"n": number}})
    assert library.allows(constraint, "[1]")
    assert not library.allows(constraint, '["a"]')


def test_format_that_is_an_annotation_is_in_the_log_in_one_line(library, caplog):
    parts = {name: {"type": "string", "format": f"shoe {name}"} for name in "aba"}
    schema = {"type": "object", "properties": {**parts, "n": {"type": "integer", "format": "int32"}}}
    with caplog.at_level(logging.WARNING):
        library.compile(of(schema))
    assert [record.message for record in caplog.records] == [
        "format 'shoe a', 'shoe b' of a JSON schema is an annotation: it constrains nothing"
    ]


def test_schemas_that_pydantic_makes_are_served(library):
    class Dog(pydantic.BaseModel):
        kind: Literal["dog"]
        chip: int = pydantic.Field(ge=-(2**63), le=2**63 - 1)

    class Cat(pydantic.BaseModel):
        kind: Literal["cat"]
        kittens: list["Cat"] = []

    class Owner(pydantic.BaseModel):
        password: pydantic.SecretStr
        home: pathlib.Path
        photo: bytes
        settings: pydantic.Json
        balance: decimal.Decimal
        site: pydantic.HttpUrl
        pets: dict[str, Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]]

    value = {
        "password": "a",
        "home": "/a",
        "photo": "a",
        "settings": "{}",
        "balance": 1.5,
        "site": "https://a.b/c",
        "pets": {"Rex": {"kind": "dog", "chip": 2**63 - 1}, "Tom": {"kind": "cat", "kittens": [{"kind": "cat"}]}},
    }
    constraint = of(Owner.model_json_schema())
    assert library.allows(constraint, json.dumps(value))
    value["pets"]["Rex"]["chip"] += 1
    assert not library.allows(constraint, json.dumps(value))


def test_enforced_formats_still_constrain(library):
    assert not library.allows(of({"type": "string", "format": "uuid"}), '"a"')


@pytest.mark.parametrize("reference", ["#", "#/$defs/node", "#/properties/left"])
def test_recursive_schemas_are_served(library, reference):
    node = {"type": "object", "properties": {"left": {"$ref": reference}}, "additionalProperties": False}
    schema = {**node, "$defs": {"node": node}}
    if reference == "#/properties/left":
        schema["properties"] = {"left": node, "right": {"$ref": reference}}
        node["properties"]["left"] = {"$ref": "#"}
    assert library.allows(of(schema), '{"left": {"left": {}}}')


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "#/$ref"),
        ({"properties": {"a": {"$ref": "#/properties/a"}}}, "#/properties/a/$ref"),
    ],
)
def test_reference_that_leads_back_to_itself_is_refused_with_its_path(library, schema, path):
    assert library.refusal(of(schema)).startswith(f"at {path}: ")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"type": "array", "items": {"$ref": "#"}, "minItems": 2}]}}},
    ],
    ids=str,
)
def test_schema_whose_values_never_end_is_refused(library, schema):
    assert "at #: no value of the schema ends" in library.refusal(of(schema))


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["a"]}, ""),
        ({"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, ""),
        ({"type": "array", "items": {"$ref": "#"}}, "[[], [[]]]"),
    ],
    ids=str,
)
def test_recursive_schema_with_a_way_out_is_served(library, schema, text):
    assert library.allows(of(schema), text or '{"a": {"a": null}}')


@pytest.mark.parametrize("constraint", [Constraint("json_object"), of({"type": "object"})], ids=["object", "schema"])
def test_whitespace_between_the_parts_of_json_has_a_bound(library, constraint):
    for text in ('{"a":1}', '{ "a" : [ 1 , 2 ] }', '{\n    "a": [\n        1\n    ]\n}', '{\n\n"a": 1}'):
        assert library.allows(constraint, text), text
    for gap in (" " * 50, "\n" * 40, "\n" + " " * 50, " \n" * 40):
        assert not library.allows(constraint, f'{{{gap}"a": 1}}'), repr(gap)


def test_whitespace_has_no_bound_with_a_pattern_that_says_so(library):
    constraint = Constraint("json_object", whitespace_pattern=r"[ \t\r\n]*")
    assert library.allows(constraint, '{"a":' + " \n" * 40 + "1}")
