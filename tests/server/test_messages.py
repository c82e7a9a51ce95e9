"""The endpoint /v1/messages: its answers, its streams, and its errors in Anthropic's form."""

import asyncio
import json
import os
import signal

import httpx
import pytest

MESSAGES = [{"role": "user", "content": "Hello"}]
URL_SOURCE = {"type": "url", "url": "data:image/png;base64,"}
TOOL = {
    "name": "find",
    "description": "Find a city.",
    "input_schema": {"type": "object", "properties": {"city": {"enum": ["Bern"]}}, "required": ["city"]},
    "cache_control": {"type": "ephemeral"},
}


@pytest.fixture
def post(in_process):
    """A function that posts a body to an application over the replay core, and returns the response."""

    def send(path="/v1/messages", headers=None, options=None, **body):
        async def ask():
            async with in_process(**(options or {})) as client:
                return await client.post(path, json={"model": "smollm2-135m-instruct"} | body, headers=headers)

        return asyncio.run(ask())

    return send


def events(answer):
    """Return the names and the data of the events of a stream."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = [block.split("\n") for block in answer.text.split("\n\n")[:-1]]
    found = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]
    assert all(name == data["type"] for name, data in found)
    return found


@pytest.mark.essential
def test_stream_has_the_events_of_a_message_and_counts_the_same_tokens(post):
    asked = {"messages": MESSAGES, "max_tokens": 5, "system": [{"type": "text", "text": "Be kind."}]}
    whole = post(**asked).json()
    assert (whole["type"], whole["role"], whole["stop_reason"]) == ("message", "assistant", "max_tokens")
    [block] = whole["content"]
    assert block["type"] == "text"
    assert whole["usage"]["output_tokens"] == 5
    found = events(post(**asked, stream=True))
    names = [name for name, _ in found]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert block["text"]
    assert "".join(data["delta"]["text"] for name, data in found if name == "content_block_delta")
    started, ended = found[0][1]["message"], found[-2][1]
    assert started["content"] == []
    prompt_tokens = sum(whole["usage"][f"{kind}input_tokens"] for kind in ("", "cache_read_"))
    assert sum(started["usage"][f"{kind}input_tokens"] for kind in ("", "cache_read_")) == prompt_tokens
    assert ended["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert ended["usage"]["output_tokens"] == 5
    counted = post("/v1/messages/count_tokens", messages=MESSAGES, system="Be kind.").json()
    assert counted == {"input_tokens": prompt_tokens}


def test_turns_with_calls_results_and_thoughts_are_read(post):
    turns = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I look it up.", "signature": "x"},
                {"type": "text", "text": "Wait."},
                {"type": "tool_use", "id": "call_1", "name": "find", "input": {"city": "Bern"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "call_1",
                    "content": [{"type": "text", "text": "in Switzerland"}],
                },
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    answer = post(messages=turns, tools=[TOOL], max_tokens=3, stop_sequences=["###"], thinking={"type": "disabled"})
    assert answer.status_code == 200, answer.text
    continued = [*MESSAGES, {"role": "assistant", "content": "I am"}]
    counts = [post("/v1/messages/count_tokens", messages=m).json()["input_tokens"] for m in (MESSAGES, continued)]
    assert 1 <= counts[1] - counts[0] <= 3, "the answer continues the last turn of the assistant"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages is empty"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
            "documents are not served",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "data:,"}}]}
                ]
            },
            "takes no images",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id is missing"),
        ({"tool_choice": {"type": "any"}}, "needs tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "lose"}}, "'lose', which is not a tool"),
        ({"tools": [{"type": "web_search_20250305", "name": "web"}]}, "tools that the server itself runs"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences must hold strings"),
        ({"output_format": {"type": "json_object", "schema": {}}}, "output_format.type must be 'json_schema'"),
    ],
)
def test_wrong_request_is_refused_in_the_form_of_the_api(post, changes, message):
    answer = post(**{"messages": MESSAGES, "max_tokens": 3} | changes)
    assert answer.status_code == 400
    body = answer.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert message in body["error"]["message"]


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
def test_thread_is_refused_so_that_clients_send_the_whole_conversation(post, thread):
    answer = post(messages=MESSAGES, max_tokens=3, thread=thread)
    error = answer.json()["error"]
    assert (answer.status_code, error["details"]) == (400, {"error_code": "thread_unsupported_request"})
    assert "send all messages, without thread" in error["message"]


def test_key_of_either_header_is_accepted_and_a_wrong_one_is_refused_in_the_form_of_the_api(post):
    options = {"api_key": ("secret",)}
    asked = {"messages": MESSAGES, "max_tokens": 2, "options": options}
    for headers in ({"x-api-key": "secret"}, {"Authorization": "Bearer secret"}):
        assert post(headers=headers, **asked).status_code == 200
    refused = post(headers={"x-api-key": "wrong"}, **asked)
    assert refused.status_code == 401
    assert refused.json()["error"]["type"] == "authentication_error"
    assert post("/v1/messages/nothing", **asked, headers={"x-api-key": "secret"}).status_code == 404


@pytest.mark.extended
def test_session_of_an_agent_continues_through_deaths_of_the_core(server):
    """Each turn of an agent is streamed while the core is killed, and its result is sent back."""
    tools = [TOOL, {**TOOL, "name": "read_file", "cache_control": None}]
    turns = [{"role": "user", "content": [{"type": "text", "text": "Where is Bern?", "cache_control": {}}]}]
    asked = {
        "model": "smollm2-135m-instruct",
        "max_tokens": 60,
        "temperature": 0,
        "tools": tools,
        "system": [{"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}}],
        "metadata": {"user_id": "x"},
        "stream": True,
    }
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "auto"}):
        body = {**asked, "messages": turns, "tool_choice": choice}
        undisturbed = blocks(streamed(server, body))
        first = server.core_pid()
        found = blocks(streamed(server, body, on_first=lambda pid=first: os.kill(pid, signal.SIGKILL)))
        assert server.core_pid() != first
        for block in (*undisturbed, *found):
            block.pop("id", None)
        assert found == undisturbed
        calls = [block for block in found if block["type"] == "tool_use"]
        answer = [{**block, **({"id": "call_1"} if block in calls else {})} for block in found]
        results = [{"type": "tool_result", "tool_use_id": "call_1", "content": "in Switzerland"}] * len(calls)
        turns = [*turns, {"role": "assistant", "content": answer}, {"role": "user", "content": results or "Thanks."}]


def streamed(server, body, on_first=lambda: None):
    """Return the events of a streamed message; `on_first` is called at the first part of a block."""
    found = []
    with httpx.stream("POST", f"{server.url}/v1/messages", json=body, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
                if found[-1]["type"] == "content_block_delta" and found[-2]["type"] == "content_block_start":
                    on_first()
                    on_first = lambda: None  # noqa: E731
    assert found[-1]["type"] == "message_stop"
    return found


def blocks(found):
    """Return the content blocks that events consist of."""
    content = []
    for event in found:
        if event["type"] == "content_block_start":
            content.append({**event["content_block"], "partial": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            content[-1]["partial"] += delta.get("text", delta.get("partial_json", ""))
        elif event["type"] == "content_block_stop":
            partial = content[-1].pop("partial")
            if content[-1]["type"] == "tool_use":
                content[-1]["input"] = json.loads(partial)
            else:
                content[-1]["text"] = partial
    return content
