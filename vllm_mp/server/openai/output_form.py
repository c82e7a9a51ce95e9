"""The form of the output that a request demands: `response_format`, and vLLM's fields for structured output."""

from typing import Annotated, Any, Literal

import msgspec

from vllm_mp.requests.structured_outputs import FORMS, StructuredOutputsParams, checked_form
from vllm_mp.server.http.body import RequestBody, refused
from vllm_mp.server.http.errors import ApiError

_FORMATS = ("text", "json_object", "json_schema", "structural_tag")

GUIDED_FIELDS: dict[str, tuple[str, Any]] = {
    "guided_json": ("json", dict[str, Any] | str | bool),
    "guided_regex": ("regex", str),
    "guided_choice": ("choice", list[str]),
    "guided_grammar": ("grammar", str),
    "structural_tag": ("structural_tag", dict[str, Any] | str),
    "guided_whitespace_pattern": ("whitespace_pattern", str),
    "guided_decoding_backend": ("backend", str),
}
"""By the older names that vLLM gave to the fields of `StructuredOutputsParams`: their newer name, and their type."""


class JsonSchema(RequestBody):
    """A JSON schema, which the answer must match."""

    name: str
    schema_: dict[str, Any] | bool | None = msgspec.field(default=None, name="schema")
    """The schema; without it, the answer is any JSON object."""
    description: str | None = None
    strict: bool | None = None
    """Accepted; every schema is enforced."""


class ResponseFormat(RequestBody):
    """The form of the answer."""

    type: Annotated[
        Literal["text", "json_object", "json_schema", "structural_tag"],
        refused(f"must be one of {', '.join(_FORMATS)}"),
    ]
    json_schema: JsonSchema | None = None
    """For the type "json_schema"."""
    structures: list[dict[str, Any]] | None = None
    """For the type "structural_tag": the tags, each with `begin`, `schema` and `end`."""
    triggers: list[str] | None = None
    """For the type "structural_tag" with `structures`: the texts after which a tag must follow."""
    format: dict[str, Any] | None = None
    """For the type "structural_tag": the newer notation, instead of `structures` and `triggers`."""
    schema_: dict[str, Any] | bool | None = msgspec.field(default=None, name="schema")
    """A schema that the answer must match, for the type "json_object", or for "json_schema" instead of `json_schema`,
    as llama.cpp and others have it."""
    value: dict[str, Any] | bool | None = None
    """The same for the type "json_object", as Hugging Face's clients have it."""


class TextFormat(RequestBody, omit_defaults=True):
    """The form of the text of a response."""

    type: Annotated[
        Literal["text", "json_object", "json_schema"], refused("must be one of text, json_object, json_schema")
    ]
    name: str | None = None
    """For the type "json_schema", which needs it."""
    schema_: dict[str, Any] | bool | None = msgspec.field(default=None, name="schema")
    """For the type "json_schema", which needs it; "json_object" may have one."""
    description: str | None = None
    strict: bool | None = None
    """Accepted; every schema is enforced."""


def output_form(body: msgspec.Struct) -> tuple[StructuredOutputsParams | None, str]:
    """Return the form of the output that a request demands, None for any, and the field that demands it.

    Raises ApiError, naming the field, if it is not a form, or if two fields demand one.
    """
    found = {
        "response_format": _of_response_format(getattr(body, "response_format", None)),
        "text.format": _of_text_format(getattr(getattr(body, "text", None), "format", None)),
        "structured_outputs": getattr(body, "structured_outputs", None),
    }
    guided = {
        newer: value for name, (newer, _) in GUIDED_FIELDS.items() if (value := getattr(body, name, None)) is not None
    }
    forms = {field: form for field, form in found.items() if form is not None}
    if guided:
        forms[next(name for name in GUIDED_FIELDS if getattr(body, name, None) is not None)] = guided
    # Options without a form, such as the pattern of whitespace, are those of the form that another field demands.
    options = {field: form for field, form in forms.items() if not FORMS & form.keys()}
    if options and len(forms) > len(options):
        forms = {field: form for field, form in forms.items() if field not in options}
        for given in options.values():
            forms = {field: {**given, **form} for field, form in forms.items()}
    if len(forms) > 1:
        first, second = list(forms)[:2]
        raise ApiError(400, f"{first} and {second} both demand a form of the answer; leave out one", param=second)
    for field, form in forms.items():
        path = _schema_path(field, body) if "json" in form else field
        try:
            return checked_form(field, form), path
        except (ValueError, TypeError) as error:
            raise ApiError(400, str(error), param=path) from None
    return None, ""


def _schema_path(field: str, body: msgspec.Struct) -> str:
    """Return the path of the schema that the field `field` holds."""
    if field == "response_format":
        given = getattr(body, field)
        names = {"schema_": "response_format.schema", "value": "response_format.value"}
        found = (name for kept, name in names.items() if getattr(given, kept, None) is not None)
        return next(found, "response_format.json_schema.schema")
    return "text.format.schema" if field == "text.format" else field


def _of_response_format(given: ResponseFormat | None) -> dict[str, Any] | None:
    """Return the fields of `StructuredOutputsParams` for a response format; None for plain text."""
    if given is not None and given.value is not None and given.type != "json_object":
        name = "response_format.value"
        raise ApiError(400, f"{name} needs the type 'json_object', got {given.type!r}; change the type", param=name)
    if given is not None and given.schema_ is not None and not given.type.startswith("json"):
        name = "response_format.schema"
        message = f"{name} needs the type 'json_object' or 'json_schema', got {given.type!r}; change the type"
        raise ApiError(400, message, param=name)
    if given is None or given.type == "text":
        return None
    if given.type in ("json_object", "json_schema"):
        schema = given.schema_
        if given.type == "json_object" and schema is None:
            schema = given.value
        if given.type == "json_schema" and given.json_schema is not None:
            if schema is not None:
                name = "response_format.schema"
                raise ApiError(400, f"{name} and json_schema are both given; leave out one of them", param=name)
            schema = given.json_schema.schema_
        elif given.type == "json_schema" and schema is None:
            name = "response_format.json_schema"
            raise ApiError(400, f"{name} is missing; add it, with a name and a schema", param=name)
        return {"json_object": True} if schema is None else {"json": schema}
    if given.format is not None:
        return {"structural_tag": {"type": "structural_tag", "format": given.format}}
    if given.structures is None or given.triggers is None:
        raise ApiError(
            400, "response_format needs format, or structures and triggers; add them", param="response_format"
        )
    return {"structural_tag": {"structures": given.structures, "triggers": given.triggers}}


def _of_text_format(given: TextFormat | None) -> dict[str, Any] | None:
    """Return the fields of `StructuredOutputsParams` for the format of a response's text; None for plain text."""
    if given is None or given.type == "text":
        return None
    if given.schema_ is None and given.type == "json_object":
        return {"json_object": True}
    if given.schema_ is None:
        raise ApiError(400, "text.format.schema is missing; add it", param="text.format.schema")
    return {"json": given.schema_}
