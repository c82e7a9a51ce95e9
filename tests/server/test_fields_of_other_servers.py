"""Fields of other servers that are served: other names, a schema of json_object, token ids as tokens, no tokens."""

import asyncio
import json
from typing import Any

import pytest

CHAT = {"messages": [{"role": "user", "content": "Name three fruits."}], "temperature": 0}
TEXT = {"prompt": "The sea is", "temperature": 0}
RESPONSE = {"input": "Name three fruits.", "temperature": 0}
SCHEMA = {"type": "object", "properties": {"n": {"enum": [7, 8]}}, "required": ["n"], "additionalProperties": False}


def answer(server, path: str, body: dict[str, Any]) -> Any:
    status, answer = server.post(path, body)
    assert status == 200, answer
    return answer


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_schema_of_a_json_object_holds(server, kind):
    form = {"type": kind, "schema": SCHEMA}
    chat = answer(server, "/v1/chat/completions", {**CHAT, "response_format": form, "max_tokens": 30})
    assert json.loads(chat["choices"][0]["message"]["content"])["n"] in (7, 8)
    response = answer(
        server,
        "/v1/responses",
        {**RESPONSE, "text": {"format": {**form, "name": "n"}}, "max_output_tokens": 30},
    )
    assert json.loads(response["output"][0]["content"][0]["text"])["n"] in (7, 8)


def test_schema_in_the_field_of_hugging_face_holds(server):
    body = {**CHAT, "response_format": {"type": "json_object", "value": SCHEMA}, "max_tokens": 30}
    assert json.loads(answer(server, "/v1/chat/completions", body)["choices"][0]["message"]["content"])["n"] in (7, 8)


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"type": "text", "schema": SCHEMA}, "response_format.schema"),
        ({"type": "json_schema", "schema": SCHEMA, "json_schema": {"name": "n"}}, "response_format.schema"),
        ({"type": "json_object", "schema": {"type": "nothing"}}, "response_format.schema"),
        ({"type": "json_object", "value": {"type": "nothing"}}, "response_format.value"),
        ({"type": "json_schema", "value": SCHEMA, "json_schema": {"name": "n"}}, "response_format.value"),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "nothing"}}}, None),
    ],
)
def test_schema_that_contradicts_the_type_or_cannot_hold_is_refused_by_its_path(server, form, param):
    status, refusal = server.post("/v1/chat/completions", {**CHAT, "response_format": form, "max_tokens": 5})
    assert (status, refusal["error"]["param"]) == (400, param or "response_format.json_schema.schema")


def test_repeat_penalty_is_repetition_penalty(server):
    texts = [
        answer(server, "/v1/completions", {**TEXT, "max_tokens": 24, **fields})["choices"][0]["text"]
        for fields in ({"repeat_penalty": 1.9}, {"repetition_penalty": 1.9}, {})
    ]
    assert texts[0] == texts[1] != texts[2]
    for fields in ({"repeat_penalty": 1.5, "repetition_penalty": 1.6}, {"repeat_penalty": -1}):
        status, refusal = server.post("/v1/completions", {**TEXT, **fields})
        assert (status, refusal["error"]["param"]) == (400, "repeat_penalty")
        assert refusal["error"]["message"].startswith("repeat_penalty")


def test_tokens_of_log_probabilities_are_ids_if_the_request_says_so(server):
    fields = {"return_tokens_as_token_ids": True, "return_token_ids": True, "max_tokens": 3}
    choice = answer(server, "/v1/completions", {**TEXT, **fields, "logprobs": 2, "echo": True})["choices"][0]
    ids = [f"token_id:{token_id}" for token_id in choice["prompt_token_ids"] + choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == ids
    assert all(ids[index] in top for index, top in enumerate(choice["logprobs"]["top_logprobs"]) if top)
    plain = answer(server, "/v1/completions", {**TEXT, "max_tokens": 3, "logprobs": 2, "echo": True})["choices"][0]
    assert choice["logprobs"]["text_offset"] == plain["logprobs"]["text_offset"]

    choice = answer(server, "/v1/chat/completions", {**CHAT, **fields, "logprobs": True, "top_logprobs": 2})["choices"][
        0
    ]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert content[0]["top_logprobs"][0]["token"].startswith("token_id:")
    assert bytes(b for entry in content for b in entry["bytes"]).decode() == choice["message"]["content"]

    body = {**RESPONSE, "return_tokens_as_token_ids": True, "top_logprobs": 1, "max_output_tokens": 2}
    part = answer(server, "/v1/responses", body)["output"][0]["content"][0]
    assert all(entry["token"].startswith("token_id:") for entry in part["logprobs"])


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_no_tokens_only_reads_the_prompt(server, name):
    fields = {name: 0, "return_token_ids": True}
    for path, body in (
        ("/v1/completions", TEXT | {"logprobs": 1}),
        ("/v1/chat/completions", CHAT | {"logprobs": True}),
    ):
        whole = answer(server, path, {**body, **fields, "n": 2, "temperature": 1})
        for choice in whole["choices"]:
            assert choice.get("text", "") == ""
            assert choice.get("message", {"content": ""})["content"] == ""
            assert (choice["finish_reason"], choice["stop_reason"], choice["token_ids"]) == ("length", None, [])
            assert not any(choice["logprobs"].values())
        assert whole["usage"]["completion_tokens"] == 0
        assert whole["usage"]["prompt_tokens"] == whole["usage"]["total_tokens"] > 0


def test_response_of_no_tokens_is_incomplete(server):
    response = answer(server, "/v1/responses", {**RESPONSE, "max_output_tokens": 0})
    assert (response["status"], response["output"][0]["content"][0]["text"]) == ("incomplete", "")
    assert response["usage"]["output_tokens"] == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_stream_of_no_tokens_has_an_end_and_a_usage_and_no_text(in_process, path):
    body = {**(TEXT if path == "/v1/completions" else CHAT), "max_tokens": 0, "stream": True}

    async def send() -> list[Any]:
        async with in_process() as client:
            response = await client.post(path, json={**body, "stream_options": {"include_usage": True}})
            lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
            return [json.loads(line) for line in lines]

    events = asyncio.run(send())
    choices = [choice for event in events for choice in event["choices"]]
    assert not any(choice.get("text") or choice.get("delta", {}).get("content") for choice in choices)
    assert choices[-1]["finish_reason"] == "length"
    assert events[-1]["usage"]["completion_tokens"] == 0


def test_no_tokens_and_a_minimum_of_tokens_contradict_each_other(server):
    status, refusal = server.post("/v1/completions", {**TEXT, "max_tokens": 0, "min_tokens": 1})
    assert (status, refusal["error"]["param"]) == (400, "min_tokens")
