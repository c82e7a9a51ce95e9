"""What a request may demand of its output is checked when it is written down."""

import dataclasses
import types

import msgspec
import pytest

from vllm_mp import GuidedDecodingParams, SamplingParams, StructuredOutputsParams, wire
from vllm_mp.requests.structured_outputs import MAX_CONSTRAINT_BYTES, Constraint
from vllm_mp.server.http.errors import ApiError
from vllm_mp.server.openai.output_form import JsonSchema, ResponseFormat, output_form

SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f>"]}


class Pydantic:
    """Has what is used of a pydantic class."""

    @staticmethod
    def model_json_schema():
        return SCHEMA


def constraint(**fields):
    return SamplingParams(structured_outputs=StructuredOutputsParams(**fields)).structured_outputs.constraint()


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"json": '{"type": "object"}'}, "json", '{"type":"object"}'),
        ({"json": {"type": "object"}}, "json", '{"type":"object"}'),
        ({"json": True}, "json", "true"),
        ({"json_object": True}, "json_object", ""),
        ({"regex": "[a-z]+é"}, "regex", "[a-z]+é"),
        ({"choice": ["yes", "no", "yes", " "]}, "choice", '["yes","no"," "]'),
        ({"grammar": 'start: "a"'}, "grammar", 'start: "a"'),
        ({"structural_tag": '{"format": {}}'}, "structural_tag", '{"format":{}}'),
    ],
    ids=str,
)
def test_each_form_becomes_a_constraint(fields, kind, text):
    assert constraint(**fields) == Constraint(kind, text)


def test_a_pydantic_class_stands_for_its_schema():
    assert constraint(json=Pydantic) == constraint(json=SCHEMA)


def test_options_of_json_reach_the_constraint():
    found = constraint(
        json=SCHEMA, disable_any_whitespace=True, disable_additional_properties=True, whitespace_pattern=" ?"
    )
    assert (found.any_whitespace, found.additional_properties, found.whitespace_pattern) == (False, False, " ?")


def test_older_names_mean_the_same():
    old = SamplingParams(guided_decoding=GuidedDecodingParams(regex="a+", backend="guidance", disable_fallback=True))
    assert old.structured_outputs is old.guided_decoding
    assert old.structured_outputs.constraint() == Constraint("regex", "a+")
    assert old.clone() == old
    assert GuidedDecodingParams.from_optional(choice=["a"], regex=None).choice == ["a"]
    assert GuidedDecodingParams.from_optional(backend="auto") is None
    with pytest.raises(ValueError, match="must not differ"):
        SamplingParams(guided_decoding={"regex": "a"}, structured_outputs={"regex": "b"})


def test_a_dict_stands_for_the_parameters_with_its_fields():
    assert SamplingParams(structured_outputs={"regex": "a"}).structured_outputs == StructuredOutputsParams(regex="a")
    with pytest.raises(ValueError, match=r"structured_outputs has no field 'regexp'; its fields are .*regex"):
        SamplingParams(structured_outputs={"regexp": "a"})


def test_the_constraint_crosses_the_wire_and_the_parameters_do_not():
    message = wire.AddRequest(1, 2, "id", b"", SamplingParams(), constraint=constraint(json=SCHEMA))
    assert wire.decode_client_message(wire.encode(message)).constraint == message.constraint


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({}, ValueError, "exactly one of json, regex,.* got none"),
        ({"json": {}, "regex": "a"}, ValueError, "got json and regex"),
        ({"json": "{"}, ValueError, "json must be valid JSON: .*truncated.* got '{'"),
        ({"json": 3}, TypeError, "json must be a dict, a JSON text or a pydantic class, got 3"),
        ({"json": "[]"}, TypeError, r"json must be a dict.* got \[\]"),
        ({"json": {"enum": [object()]}}, TypeError, "json must be plain JSON data"),
        ({"json_object": False}, ValueError, "json_object must be True or None, got False"),
        ({"regex": ""}, ValueError, "regex must not be empty"),
        ({"regex": "\ud800"}, ValueError, "regex must hold valid Unicode"),
        ({"regex": b"a"}, TypeError, "regex must be a text, got b'a'"),
        ({"regex": "a" * (MAX_CONSTRAINT_BYTES + 1)}, ValueError, "regex must have at most 1048576 bytes, got 1048577"),
        ({"grammar": 5}, TypeError, "grammar must be a text, got 5"),
        ({"choice": []}, ValueError, "choice must hold 1 to 16384 texts, got 0"),
        ({"choice": "ab"}, TypeError, "choice must be a list of texts, got 'ab'"),
        ({"choice": ["a", 1]}, TypeError, "choice must hold texts, got 1"),
        ({"choice": ["a", ""]}, ValueError, "choice must not hold an empty text"),
        ({"structural_tag": "true"}, TypeError, "structural_tag must be a dict"),
        ({"json": {}, "disable_any_whitespace": 1}, TypeError, "disable_any_whitespace must be True or False, got 1"),
        ({"json": {}, "whitespace_pattern": " " + "x" * 256}, ValueError, "whitespace_pattern .* 256 .* got 257"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_can_be_no_constraint_is_refused_by_name(fields, error, words):
    with pytest.raises(error, match=words):
        StructuredOutputsParams(**fields)


def test_schema_that_is_nested_too_deeply_is_refused():
    schema: dict = {"type": "integer"}
    for _ in range(40):
        schema = {"type": "array", "items": schema}
    constraint(json=schema)
    for _ in range(25):
        schema = {"items": schema}
    with pytest.raises(ValueError, match="json must have at most 64 levels"):
        constraint(json=schema)


@pytest.mark.parametrize("value", ["json", 3, dataclasses.field()], ids=str)
def test_structured_outputs_of_another_type_are_refused(value):
    with pytest.raises(TypeError, match="structured_outputs must be StructuredOutputsParams or a dict of its fields"):
        SamplingParams(structured_outputs=value)


@pytest.mark.parametrize("backend", [None, "", "auto", "llguidance", "xgrammar", "guidance"])
def test_each_backend_means_the_same(backend):
    assert GuidedDecodingParams(regex="a", backend=backend).constraint() == Constraint("regex", "a")


def test_unknown_backend_is_refused():
    with pytest.raises(ValueError, match=r"backend must be one of auto, .*guidance, got 'outlines'"):
        GuidedDecodingParams(regex="a", backend="outlines")


@pytest.mark.parametrize(
    "options",
    [{"guided_whitespace_pattern": "\n?"}, {"structured_outputs": {"whitespace_pattern": "\n?"}}],
    ids=str,
)
def test_options_of_a_request_apply_to_the_form_of_its_other_field(options):
    given = ResponseFormat(type="json_schema", json_schema=JsonSchema(name="a", schema_=SCHEMA))
    form, field = output_form(types.SimpleNamespace(response_format=given, **options))
    assert field == "response_format.json_schema.schema"
    assert form.constraint() == msgspec.structs.replace(constraint(json=SCHEMA), whitespace_pattern="\n?")


def test_two_forms_of_a_request_are_refused():
    body = types.SimpleNamespace(response_format=ResponseFormat(type="json_object"), guided_regex="a")
    with pytest.raises(ApiError, match="response_format and guided_regex both demand a form"):
        output_form(body)
    with pytest.raises(ApiError, match="exactly one of json, regex"):
        output_form(types.SimpleNamespace(guided_whitespace_pattern="a"))
