"""Fields of requests that the server does not know: ignored with a line in the log and a count, or refused."""

import asyncio
import itertools
import logging
from typing import Annotated, Any

import msgspec
import pytest

from vllm_mp.client.stats import Cells
from vllm_mp.server.http.body import IgnoredFields, RemovedField, RequestBody, decode_body, unserved
from vllm_mp.server.http.body.ignored_fields import LABELS
from vllm_mp.server.http.errors import ApiError

STRICT = {"Prefer": "handling=strict"}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
TEXT = {"prompt": "x", "max_tokens": 1}
RESPONSE = {"input": "x", "max_output_tokens": 1}
UNKNOWN = [
    *({"num_ctx": 4096}, {"keep_alive": "5m"}, {"options": {"seed": 1}}, {"thinking": {"type": "enabled"}}),
    *({"cache_prompt": True}, {"documents": []}, {"provider": {"order": ["a"]}}, {"temperatur": 0.5}),
]
ENDPOINTS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/v1/responses": RESPONSE,
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}


@pytest.fixture
def post(in_process):
    """A function that returns the status and the body of the response to a request."""

    def post(path: str, body: Any, headers: dict[str, str] | None = None, **options: Any) -> tuple[int, Any]:
        async def send() -> tuple[int, Any]:
            async with in_process(**options) as client:
                response = await client.post(path, json=body, headers=headers)
                return response.status_code, response.json()

        return asyncio.run(send())

    return post


@pytest.mark.essential
@pytest.mark.parametrize(("path", "fields"), list(itertools.product(ENDPOINTS, UNKNOWN)))
def test_unknown_field_is_ignored_unless_the_request_is_strict(post, path, fields):
    [name] = fields
    body = {**ENDPOINTS[path], **fields}
    assert post(path, body)[0] == 200
    status, answer = post(path, body, STRICT)
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, name, "unknown_field")


NESTED = {
    "messages[0].timestamp": {**CHAT, "messages": [{"role": "user", "content": "x", "timestamp": 5}]},
    "messages[0].cache_control": {**CHAT, "messages": [{"role": "user", "content": "x", "cache_control": {}}]},
    "messages[0].content[0].citations": {
        **CHAT,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x", "citations": []}]}],
    },
    "messages[0].tool_calls[0].index": {
        **CHAT,
        "messages": [
            {
                "role": "assistant",
                "content": "x",
                "tool_calls": [
                    {"id": "1", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}"}}
                ],
            }
        ],
    },
    "tools[0].cache_control": {
        **CHAT,
        "tools": [{"type": "function", "cache_control": {}, "function": {"name": "f"}}],
        "tool_choice": "none",
    },
    "tools[0].function.returns": {
        **CHAT,
        "tools": [{"type": "function", "function": {"name": "f", "returns": {}}}],
        "tool_choice": "none",
    },
    "response_format.name": {**CHAT, "response_format": {"type": "text", "name": "x"}},
    "echo": {**CHAT, "echo": True},
    "stream_options.usage": {**CHAT, "stream_options": {"usage": True, "include_usage": True}},
}


@pytest.mark.parametrize("param", NESTED)
def test_unknown_field_in_an_object_is_ignored_unless_the_request_is_strict(post, param):
    assert post("/v1/chat/completions", NESTED[param])[0] == 200
    status, answer = post("/v1/chat/completions", NESTED[param], STRICT)
    assert (status, answer["error"]["param"]) == (400, param)


def test_unknown_field_of_an_item_of_a_response_is_ignored_unless_the_request_is_strict(post):
    body = {**RESPONSE, "input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "hint": 1}]}]}
    assert post("/v1/responses", body)[0] == 200
    status, answer = post("/v1/responses", body, STRICT)
    assert (status, answer["error"]["param"]) == (400, "input[0].content[0].hint")


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        ("/v1/chat/completions", {"verbosity": "low"}, "verbosity is not served; leave it out"),
        ("/v1/chat/completions", {"web_search_options": {}}, "web_search_options is not served; leave it out"),
        ("/v1/chat/completions", {"stream_options": {"include_usage": True}}, "stream_options needs stream=true"),
        ("/v1/responses", {"context_management": []}, "context_management is not served; leave it out"),
    ],
)
def test_known_field_without_effect_is_ignored_unless_the_request_is_strict(post, path, fields, said):
    body = ENDPOINTS[path] | fields
    assert post(path, body)[0] == 200
    for headers, options in ((STRICT, {}), ({}, {"strict_requests": True})):
        status, answer = post(path, body, headers, **options)
        assert (status, answer["error"]["param"]) == (400, next(iter(fields)))
        assert said in answer["error"]["message"]


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("handling=strict", 400),
        ('respond-async, Handling="strict"; x=1', 400),
        ("wait=5,handling = strict", 400),
        ("handling=lenient", 200),
        ("mishandling=strict", 200),
        ("handling=stricter", 200),
    ],
)
def test_header_prefer_makes_a_request_strict(post, header, status):
    assert post("/v1/completions", {**TEXT, "num_ctx": 1}, {"Prefer": header})[0] == status


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "y"}, "suffix"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"temperature": "warm"}, "temperature"),
        ({"stream_options": {"include_usage": 7}}, "stream_options.include_usage"),
        ({"prompt": None}, "prompt"),
    ],
)
def test_wrong_field_beside_an_unknown_one_is_still_refused_by_name(post, fields, param):
    status, answer = post("/v1/completions", {"num_ctx": 1, **TEXT, **fields, "provider": {}})
    assert (status, answer["error"]["param"]) == (400, param)


class Part(RequestBody, tag_field="kind", tag="part"):
    size: int = 0


class Other(RequestBody, tag_field="kind", tag="other"):
    width: int = 0


class Body(RequestBody):
    """Structs in every place in which a type can have them."""

    parts: list[Part | Other] | str | None = None
    named: dict[str, Part] | None = None
    ids: dict[int, float] | None = None
    anything: dict[str, Any] | None = None
    style: Annotated[str | None, unserved()] = None


def decoded(body: Any) -> tuple[Any, list[RemovedField]]:
    removed: list[RemovedField] = []
    return msgspec.to_builtins(decode_body(msgspec.json.encode(body), Body, removed)), removed


def test_unknown_fields_are_found_at_every_depth_and_others_stay():
    known = {
        "parts": [{"kind": "part", "size": 1}, {"kind": "other", "width": 2}],
        "named": {"any": {"kind": "part", "size": 3}},
        "ids": {"5": 1},
        "anything": {"deep": [{"x": 1}]},
        "style": "plain",
    }
    body = msgspec.json.decode(msgspec.json.encode(known))
    body["more"] = 1
    body["parts"][0]["width"] = 1
    body["parts"][1]["widht"] = {"parts": [1]}
    body["parts"].append({"kind": "other", "widht": 5})
    body["named"]["any"]["y"] = None
    value, removed = decoded(body)
    assert value == {
        **known,
        "parts": [*known["parts"], {"kind": "other", "width": 0}],
        "ids": {5: 1.0},
    }
    assert {field.path for field in removed} == {"more", "parts[].width", "parts[].widht", "named[].y"}
    assert next(field for field in removed if field.name == "widht").why.endswith("; did you mean `width`?")


def test_value_that_is_not_served_is_removed_and_one_that_is_stays():
    value, removed = decoded({"style": {"bold": True}})
    assert (value["style"], [field.path for field in removed]) == (None, ["style"])
    with pytest.raises(ApiError, match=r"style is not served; leave it out"):
        decode_body(b'{"style": 5}', Body)


def test_body_full_of_unknown_fields_is_decoded_and_reports_a_bounded_number():
    _, removed = decoded({f"{'x' * 1000}{number}": number for number in range(1000)} | {"parts": "x"})
    assert len(removed) <= 64
    assert all(len(field.path) <= 100 for field in removed)


def test_each_name_is_logged_once_and_the_number_of_lines_is_bounded(caplog):
    ignored = IgnoredFields(Cells())
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            ignored.add([RemovedField("messages[].timestamp", "this server does not know it")])
        assert [record.getMessage().count("'messages[].timestamp'") for record in caplog.records] == [1]
        assert "--strict-requests" in caplog.text
        for number in range(1000):
            ignored.add([RemovedField(f"field\n{number}", "x")])
    assert len(caplog.records) < 210
    assert all("\n" not in record.getMessage() for record in caplog.records)


def test_metric_counts_requests_by_known_names_only(post, in_process):
    async def run() -> tuple[str, str]:
        async with in_process() as client:
            before = (await client.get("/metrics")).text
            for number in range(3):
                await client.post("/v1/completions", json={**TEXT, "num_ctx": 1, f"made_up_{number}": 1})
            return before, (await client.get("/metrics")).text

    before, after = asyncio.run(run())
    assert "vllm_mp:ignored_request_fields_total{" not in before
    assert 'vllm_mp:ignored_request_fields_total{field="num_ctx"} 3.0' in after
    assert 'vllm_mp:ignored_request_fields_total{field="other"} 3.0' in after
    assert "made_up" not in after
    assert len(set(LABELS)) == len(LABELS)


def test_misspelt_field_is_ignored_and_the_log_suggests_the_name(post, caplog):
    with caplog.at_level(logging.WARNING):
        assert post("/v1/completions", {**TEXT, "temperatur": 0.5})[0] == 200
    assert "'temperatur'" in caplog.text
    assert "did you mean `temperature`?" in caplog.text


def test_large_body_with_unknown_fields_is_decoded_beside_the_event_loop(post):
    messages = [{"role": "user", "content": "x", "timestamp": number} for number in range(20_000)]
    status, answer = post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
