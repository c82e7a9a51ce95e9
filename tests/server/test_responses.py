"""The endpoint /v1/responses: its answers, its stream, and what it refuses by name."""

import asyncio
import json
import re

import pytest
from openai.types.responses import Response

CONVERSATION = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def post(in_process):
    """A function that posts a body to an application over the replay core, and returns the response."""

    def send(**body):
        async def ask():
            async with in_process() as client:
                return await client.post("/v1/responses", json={"max_output_tokens": 4} | body)

        return asyncio.run(ask())

    return send


@pytest.fixture
def tokenized(in_process):
    """A function that returns the number of tokens of a conversation, as the server's chat template writes it."""

    def count(messages):
        async def ask():
            async with in_process() as client:
                return (await client.post("/tokenize", json={"messages": messages})).json()["count"]

        return asyncio.run(ask())

    return count


def created(answer):
    """Return the response object of `answer`, checked against the type of the openai client."""
    assert answer.status_code == 200, answer.text
    return Response.model_validate(answer.json())


def events(answer):
    """Return the data of the events of a stream."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [json.loads(block.partition("data: ")[2]) for block in answer.text.split("\n\n")[:-1]]


@pytest.mark.essential
def test_response_says_what_was_asked_and_answered(post):
    response = created(
        post(
            input=CONVERSATION,
            instructions="Be kind.",
            temperature=0.5,
            top_p=0.9,
            metadata={"purpose": "test"},
            user="me",
            prompt_cache_key="key",
            parallel_tool_calls=False,
            request_id="abc",
        )
    )
    assert (response.id, response.output[0].id) == ("resp_abc", "msg_abc")
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.instructions, response.temperature, response.top_p) == ("Be kind.", 0.5, 0.9)
    assert (response.metadata, response.user, response.prompt_cache_key) == ({"purpose": "test"}, "me", "key")
    assert (response.max_output_tokens, response.parallel_tool_calls, response.store) == (4, False, False)
    assert response.output_text
    assert response.usage.output_tokens == 4
    assert response.usage.total_tokens == response.usage.input_tokens + 4


def test_input_becomes_the_prompt_of_the_chat_template(post, tokenized):
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]
    usage = created(post(input=items, instructions="Be kind.")).usage
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    assert usage.input_tokens == tokenized(messages)


@pytest.mark.essential
def test_stream_ends_with_the_response_whose_text_its_deltas_made(post):
    stream = post(input=CONVERSATION, request_id="abc", stream=True)
    last = events(stream)[-1]
    assert last["type"] == "response.incomplete"
    response = Response.model_validate(last["response"])
    assert response.id == "resp_abc"
    assert response.output_text == "".join(event["delta"] for event in events(stream) if "delta" in event) != ""
    assert response.usage.output_tokens == 4
    assert "[DONE]" not in stream.text


@pytest.mark.parametrize("stream", [False, True])
def test_truncation_leaves_out_the_oldest_turns(post, replay_engine, stream):
    limit = replay_engine.model_config.max_model_len
    turns = [{"role": "developer", "content": "Be kind."}]
    for _ in range(limit // 500):
        turns += [{"role": "user", "content": "word " * 1000}, {"role": "assistant", "content": "fine"}]
    turns.append({"role": "user", "content": "Hello"})
    refused = post(input=turns)
    assert refused.status_code == 400
    assert "too long" in refused.json()["error"]["message"]
    answer = post(input=turns, truncation="auto", stream=stream)
    usage = events(answer)[-1]["response"]["usage"] if stream else answer.json()["usage"]
    assert limit - 1100 < usage["input_tokens"] <= limit - 4


def test_truncation_refuses_a_turn_that_is_too_long_alone(post, replay_engine):
    answer = post(input="word " * replay_engine.model_config.max_model_len, truncation="auto")
    assert answer.status_code == 400
    assert "too long" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("conversation", "conv_1"),
        ("prompt", {"id": "pmpt_1"}),
        ("background", True),
        ("tools[0].type", [{"type": "web_search", "name": "a"}]),
        ("tool_choice.type", {"type": "web_search", "name": "a"}),
        ("text.format.type", {"format": {"type": "grammar"}}),
        ("moderation", {"model": "a"}),
        ("n", 2),
        ("max_tokens", 2),
    ],
)
def test_field_that_is_not_served_is_refused_by_name(post, field, value):
    answer = post(**{"input": CONVERSATION, re.split(r"[.\[]", field)[0]: value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (field, "unsupported_field")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input", None),
        ("input", 1),
        ("input", []),
        ("input[0].content", [{"role": "user", "content": 1}]),
        ("max_output_tokens", -1),
        ("temperature", -1),
        ("metadata", {str(number): "a" for number in range(17)}),
        ("top_logprobs", 21),
        ("include[0]", ["everything"]),
        ("truncation", "middle"),
        ("instructions", ["a"]),
        ("tools[0].name", [{"type": "function"}]),
        ("tools[0].parameters", [{"type": "function", "name": "a", "parameters": {"type": "array"}}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}),
        ("tool_choice.tools", {"type": "allowed_tools", "mode": "auto"}),
        ("text.format.schema", {"format": {"type": "json_schema", "name": "a"}}),
        ("reasoning.effort", {"effort": "huge"}),
    ],
)
def test_wrong_field_is_refused_by_its_path(post, field, value):
    answer = post(**{"input": CONVERSATION, re.split(r"[.\[]", field)[0]: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [], "tool_choice": "auto", "max_tool_calls": 3},
        {"text": {"format": {"type": "text"}, "verbosity": "medium"}},
        {"reasoning": {"effort": None}},
        {"reasoning": {"effort": "xhigh"}},
        {"reasoning": {"effort": "max"}},
        {"include": ["reasoning.encrypted_content"], "store": True, "service_tier": "auto"},
        {"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}},
        {"context_management": [{"type": "compaction", "compact_threshold": 1000}]},
        {"background": False, "previous_response_id": None},
        {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 3, "stop": ["\n"], "ignore_eos": True},
    ],
)
def test_values_of_a_plain_request_are_accepted(post, body):
    created(post(input=CONVERSATION, **body))


@pytest.mark.parametrize(
    ("method", "path"), [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")]
)
def test_no_response_is_stored(in_process, method, path):
    async def ask():
        async with in_process() as client:
            return await client.request(method, f"/v1/responses/resp_1{path}")

    answer = asyncio.run(ask())
    assert answer.status_code == 404
    assert "stores no responses" in answer.json()["error"]["message"]
