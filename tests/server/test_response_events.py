"""The events of a streamed response have the types, the order and the numbers that the openai client expects."""

import json

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from vllm_mp.client.reasoning import Qwen3ReasoningParser
from vllm_mp.client.tool_parsers import HermesToolParser, Tool
from vllm_mp.server.openai.answer_parts import AnswerFormat
from vllm_mp.server.openai.logprobs import TokenLogprob, TopLogprob
from vllm_mp.server.openai.output_form import TextFormat
from vllm_mp.server.openai.responses.body import TextConfig
from vllm_mp.server.openai.responses.events import EventEncoder
from vllm_mp.server.openai.responses.object import (
    InputTokensDetails,
    OutputTokensDetails,
    ResponseObject,
    Usage,
)
from vllm_mp.server.openai.responses.output import ResponseOutput
from vllm_mp.server.openai.tools import ToolUse

USAGE = Usage(5, InputTokensDetails(0), 2, OutputTokensDetails(), 7)


TOOLS = ToolUse(
    definitions=[], tools=[Tool("f"), Tool("g")], parser=HermesToolParser, form=None, is_named=False, is_single=False
)


class Stream:
    """The events of a response, encoded as they come."""

    def __init__(self, response, answer_format):
        self._output = ResponseOutput(response, "1", answer_format)
        self._encoder = EventEncoder()

    def begin(self):
        return self._encoder.encode(self._output.begin())

    def delta(self, text, logprobs=(), token_ids=()):
        return self._encoder.encode(self._output.add(text, token_ids, list(logprobs)))

    def end(self, finish_reason, usage):
        return self._encoder.encode(self._output.end(finish_reason, usage))

    def fail(self, message):
        return self._encoder.encode(self._output.fail(message))


def stream_of(answer_format):
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
        reasoning=None,
        text=TextConfig(format=TextFormat(type="text")),
        tool_choice="auto",
        tools=[],
        top_logprobs=0,
        top_p=1.0,
        truncation="disabled",
        user=None,
    )
    return Stream(response, answer_format)


@pytest.fixture
def events():
    return stream_of(AnswerFormat())


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


def test_thought_text_and_calls_are_items_in_the_order_of_the_answer():
    answer = (
        "<think>\nHm, hm.\n</think>\n\nI look.\n"
        '<tool_call>\n{"name": "f", "arguments": {"city": "Bern"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    )
    whole = stream_of(AnswerFormat(TOOLS, Qwen3ReasoningParser))
    in_pieces = stream_of(AnswerFormat(TOOLS, Qwen3ReasoningParser))
    lasts = []
    for events, pieces in ((whole, [answer]), (in_pieces, list(answer))):
        sent = parsed(events.begin() + b"".join(events.delta(piece) for piece in pieces) + events.end("stop", USAGE))
        thought, message, first, second = output = sent[-1].response.output
        assert [item.type for item in output] == ["reasoning", "message", "function_call", "function_call"]
        assert (thought.content[0].text, message.content[0].text.strip()) == ("Hm, hm.", "I look.")
        assert [(call.name, json.loads(call.arguments)) for call in (first, second)] == [
            ("f", {"city": "Bern"}),
            ("g", {}),
        ]
        assert first.call_id != second.call_id
        assert len({item.id for item in output}) == 4
        deltas = ["", "", "", ""]
        for event in sent:
            if event.type.endswith(".delta"):
                assert event.item_id == output[event.output_index].id
                deltas[event.output_index] += event.delta
        assert deltas == [thought.content[0].text, message.content[0].text, first.arguments, second.arguments]
        done = [event.item for event in sent if event.type == "response.output_item.done"]
        assert done == output
        lasts.append([item.model_dump(exclude={"call_id"}) for item in output])
    assert lasts[0] == lasts[1]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["<think>", "Hm", "</think>", "Yes", "."], 3),
        (["<think>", "Hm", "</", "think", ">", "Yes"], 5),
        (["<think>", "Hm.<", "/th", "ink>Yes", "."], 4),
        (["<think>", "Hm", "</think", ">\n\nYes", "."], 4),
        (["<think>", "Hm", "</", "thing>", "Hm"], 5),
    ],
)
def test_tokens_of_the_thought_are_counted_up_to_its_end_however_it_is_split(tokens, expected):
    answer_format = AnswerFormat(None, Qwen3ReasoningParser, token_bytes=lambda token: tokens[token].encode())
    for size in (1, 2, len(tokens)):
        events = stream_of(answer_format)
        sent = events.begin()
        for begin in range(0, len(tokens), size):
            ids = range(len(tokens))[begin : begin + size]
            sent += events.delta("".join(tokens[token] for token in ids), token_ids=ids)
        sent += events.end("stop", USAGE)
        assert parsed(sent)[-1].response.usage.output_tokens_details.reasoning_tokens == expected
    parts = answer_format.whole("".join(tokens), range(len(tokens)))
    assert parts.num_reasoning_tokens == expected


def test_call_that_the_limit_cuts_off_is_incomplete():
    events = stream_of(AnswerFormat(TOOLS))
    text = '<tool_call>\n{"name": "f", "arguments": {"city": "Be'
    last = parsed(events.begin() + events.delta(text) + events.end("length", USAGE))[-1].response
    [call] = last.output
    assert (last.status, call.status, call.arguments) == ("incomplete", "incomplete", '{"city": "Be')


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
