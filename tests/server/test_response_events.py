"""The events of a streamed response have the types, the order and the numbers that the openai client expects."""

import json

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from vllm_mp.server.logprobs import TokenLogprob, TopLogprob
from vllm_mp.server.response_events import ResponseEvents
from vllm_mp.server.response_object import (
    InputTokensDetails,
    OutputTokensDetails,
    ResponseObject,
    Usage,
)

USAGE = Usage(5, InputTokensDetails(0), 2, OutputTokensDetails(), 7)


@pytest.fixture
def events():
    response = ResponseObject(
        id="resp_1",
        created_at=1,
        instructions=None,
        max_output_tokens=None,
        metadata={},
        model="m",
        parallel_tool_calls=True,
        prompt_cache_key=None,
        safety_identifier=None,
        temperature=1.0,
        tool_choice="auto",
        top_logprobs=0,
        top_p=1.0,
        truncation="disabled",
        user=None,
    )
    return ResponseEvents(response, "msg_1")


def parsed(stream):
    """Return the events of `stream`, each checked against the type that the openai client has for it."""
    result = []
    for block in stream.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = TypeAdapter(ResponseStreamEvent).validate_json(data.removeprefix("data: "))
        assert name == f"event: {event.type}"
        if hasattr(event, "response"):
            Response.model_validate(json.loads(data.removeprefix("data: "))["response"])
        result.append(event)
    assert [event.sequence_number for event in result] == list(range(len(result)))
    return result


def test_events_of_an_answer_come_in_openais_order(events):
    stream = events.begin() + events.delta("Hi", []) + events.delta(" all", []) + events.end("stop", USAGE)
    answer = parsed(stream)
    assert [event.type for event in answer] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert answer[0].response.status == answer[1].response.status == "in_progress"
    assert answer[0].response.output == []
    assert (answer[2].item.status, answer[2].item.content) == ("in_progress", [])
    assert answer[3].part.text == ""
    assert answer[6].text == answer[7].part.text == answer[8].item.content[0].text == "Hi all"
    last = answer[-1].response
    assert (last.status, last.output_text, last.usage.total_tokens) == ("completed", "Hi all", 7)
    assert last.completed_at is not None
    assert {event.item_id for event in answer if hasattr(event, "item_id")} == {last.output[0].id}


def test_answer_that_reaches_its_limit_ends_incomplete(events):
    last = parsed(events.begin() + events.delta("Hi", []) + events.end("length", USAGE))[-1]
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details.reason == "max_output_tokens"
    assert (last.response.status, last.response.output[0].status) == ("incomplete", "incomplete")


def test_aborted_answer_ends_failed_with_the_text_so_far(events):
    last = parsed(events.begin() + events.delta("Hi", []) + events.end("abort", USAGE))[-1]
    assert last.type == "response.failed"
    assert last.response.output_text == "Hi"
    assert last.response.error.code == "server_error"


def test_error_of_the_engine_ends_the_stream_with_its_message(events):
    last = parsed(events.begin() + events.delta("Hi", []) + events.fail("the core is dead"))[-1]
    assert last.type == "response.failed"
    assert last.response.error.message == "the core is dead"


def test_log_probabilities_come_with_each_delta_and_with_the_whole_text(events):
    first, second = (
        TokenLogprob(token, -0.5, list(token.encode()), [TopLogprob(token, -0.5, list(token.encode()))])
        for token in ("Hi", " all")
    )
    answer = parsed(
        events.begin() + events.delta("Hi", [first]) + events.delta(" all", [second]) + events.end("stop", USAGE)
    )
    assert [logprob.token for event in answer[4:6] for logprob in event.logprobs] == ["Hi", " all"]
    assert [logprob.token for logprob in answer[6].logprobs] == ["Hi", " all"]
    assert [logprob.top_logprobs[0].logprob for logprob in answer[-1].response.output[0].content[0].logprobs] == [
        -0.5
    ] * 2


def test_delta_without_text_sends_no_event(events):
    assert events.delta("", []) == b""
