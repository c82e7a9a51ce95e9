"""Structured output over HTTP, with OpenAI's own client and a real model."""

import json
import re
from typing import Literal

import openai
import pydantic
import pytest

MODEL = "smollm2-135m-instruct"
MESSAGES = [{"role": "user", "content": "Describe a person who lives in Bern."}]
RANDOM = {"model": MODEL, "temperature": 1.0, "max_tokens": 120, "seed": 3}


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    age: int = pydantic.Field(ge=0, le=120)
    occupation: Literal["astronomer", "shoemaker"]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openais_helper_parses_an_answer_into_a_pydantic_class(client):
    answer = client.chat.completions.parse(messages=MESSAGES, response_format=Person, **RANDOM)
    assert isinstance(answer.choices[0].message.parsed, Person)
    assert answer.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(messages=MESSAGES, response_format=Person, **RANDOM) as stream:
        streamed = stream.get_final_completion()
    assert streamed.choices[0].message.parsed == answer.choices[0].message.parsed


def test_openais_helper_parses_the_text_of_a_response(client):
    request = {"model": MODEL, "input": MESSAGES, "text_format": Person, "extra_body": {"seed": 3}}
    answer = client.responses.parse(**request)
    assert isinstance(answer.output_parsed, Person)
    with client.responses.stream(**request) as stream:
        assert stream.get_final_response().output_parsed == answer.output_parsed


@pytest.mark.parametrize(
    "fields",
    [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "p", "schema": Person.model_json_schema()},
            }
        },
        {"guided_json": Person.model_json_schema()},
        {"guided_json": json.dumps(Person.model_json_schema())},
        {"structured_outputs": {"json": Person.model_json_schema(), "disable_any_whitespace": True}},
    ],
    ids=["response_format", "guided_json", "guided_json as text", "structured_outputs"],
)
def test_each_name_of_a_schema_holds_for_chats_and_completions(server, fields):
    for path, prompt in (
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": "A person:"}),
    ):
        status, answer = server.post(path, {**prompt, **fields, **RANDOM})
        assert status == 200, answer
        choice = answer["choices"][0]
        Person.model_validate_json(choice["text"] if "text" in choice else choice["message"]["content"])


TAGGED = {
    "type": "tag",
    "begin": "<f>",
    "content": {
        "type": "json_schema",
        "json_schema": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
    "end": "</f>",
}


@pytest.mark.essential
@pytest.mark.parametrize(
    ("pattern", "fields"),
    [
        (r"\d{3}-\d{4}", {"guided_regex": r"\d{3}-\d{4}", "guided_decoding_backend": "guidance"}),
        ("yes|no", {"guided_choice": ["yes", "no"]}),
        ("ab{1,2}c", {"guided_grammar": 'start: "a" "b" "b"? "c"'}),
        (r"(?s)\s*\{.*", {"response_format": {"type": "json_object"}, "max_tokens": 5}),
        ("(?s).*", {"response_format": {"type": "text"}, "max_tokens": 3}),
        (
            r'<f>\{\s*"a":\s*\d\s*\}</f>',
            {"response_format": {"type": "structural_tag", "format": TAGGED}, "structured_outputs": None},
        ),
    ],
    ids=["regex", "choice", "grammar", "json_object", "text", "structural_tag"],
)
def test_other_forms_of_output(server, pattern, fields):
    status, answer = server.post("/v1/chat/completions", {"messages": MESSAGES, **RANDOM, **fields})
    assert status == 200, answer
    assert re.fullmatch(pattern, answer["choices"][0]["message"]["content"].replace("\n", ""))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": {"type": "foo"}}}},
            "response_format.json_schema.schema",
            "foo",
        ),
    ],
    ids=["regex", "schema"],
)
def test_constraint_that_cannot_be_compiled_is_a_bad_request(server, fields, param, words, stream):
    status, answer = server.post("/v1/chat/completions", {"messages": MESSAGES, "stream": stream, **fields})
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, "invalid_constraint")
    assert words in answer["error"]["message"]
