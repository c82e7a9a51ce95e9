"""The blocks of /v1/messages keep the order of the answer, and are the same in a stream and in a whole message."""

import json

import msgspec
import pytest
from support.answer_texts import divisions

from vllm_mp.client.reasoning import Qwen3ReasoningParser
from vllm_mp.client.tool_parsers import HermesToolParser, Tool
from vllm_mp.outputs import CompletionOutput
from vllm_mp.requests.structured_outputs import StructuredOutputsParams
from vllm_mp.server.anthropic.answer import MessageContent, MessageObject, Usage
from vllm_mp.server.openai.answer_parts import AnswerFormat
from vllm_mp.server.openai.tools import ToolUse

USAGE = Usage(1, 1, 0)
GRAMMAR = StructuredOutputsParams(json_object=True)
CALL = '<tool_call>\n{"name": "get", "arguments": %s}\n</tool_call>'
GET = {"type": "tool_use", "name": "get", "input": {"a": "b"}}


def text(content):
    return {"type": "text", "text": content}


def thinking(content):
    return {"type": "thinking", "thinking": content, "signature": ""}


def answer_format(form=None, **changes):
    tools = ToolUse(
        definitions=[], tools=[Tool("get")], parser=HermesToolParser, form=form, is_named=False, is_single=False
    )
    return AnswerFormat(tools, Qwen3ReasoningParser, **changes)


def message_of(parts, format, finish_reason):
    """Return the message of an answer, without the ids of its calls, and the data of the events of its stream."""
    message = MessageObject(id="msg_1", model="m", usage=USAGE)
    content = MessageContent(message, format)
    stream = content.begin() + b"".join(map(content.add, parts))
    stream += content.end(CompletionOutput(0, "", [], finish_reason=finish_reason), USAGE)
    events = [json.loads(line.removeprefix("data: ")) for line in stream.decode().split("\n") if line[:5] == "data:"]
    assert events[0]["message"]["content"] == []
    whole = msgspec.to_builtins(message)
    for block in whole["content"]:
        block.pop("id", None)
    return whole, events


def streamed_blocks(events):
    """Return the blocks that a client makes of events, with the text of a call's arguments as its input."""
    blocks, is_open = [], False
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert (is_open, event["index"]) == (False, len(blocks))
                is_open = True
                blocks.append(event["content_block"])
                if blocks[-1]["type"] == "tool_use":
                    blocks[-1].pop("id")
                    blocks[-1]["input"] = ""
            case "content_block_delta":
                assert (is_open, event["index"]) == (True, len(blocks) - 1)
                kind, added = event["delta"].values()
                field = {"tool_use": "input"}.get(blocks[-1]["type"], kind.removesuffix("_delta"))
                blocks[-1][field] += added
            case "content_block_stop":
                assert (is_open, event["index"]) == (True, len(blocks) - 1)
                is_open = False
    assert not is_open
    return blocks


def checked(answer, format=None, finish_reason="stop"):
    """Return the blocks and the stop reason of an answer, which are the same however it arrives."""
    found = []
    for parts in divisions(answer):
        message, events = message_of(parts, format or answer_format(), finish_reason)
        assert events[-2]["delta"]["stop_reason"] == message["stop_reason"]
        blocks = streamed_blocks(events)
        assert [block["type"] for block in blocks] == [block["type"] for block in message["content"]]
        for block, whole in zip(blocks, message["content"], strict=True):
            if block["type"] != "tool_use":
                assert block == whole
            elif message["stop_reason"] == "tool_use":
                assert json.loads(block["input"]) == whole["input"]
        found.append((message["content"], message["stop_reason"]))
    assert all(each == found[0] for each in found)
    return found[0]


@pytest.mark.parametrize("form", [None, GRAMMAR])
def test_thought_texts_and_calls_keep_their_order(form):
    call = CALL % '{"a": "b"}'
    answer = f"<think>\nHm.\n</think>\n\nLook. {call}\nDone now.{call}\n{call}"
    expected = [thinking("Hm."), text("Look. "), GET, text("\nDone now."), GET, GET]
    assert checked(answer, answer_format(form)) == (expected, "tool_use")
    assert checked(answer, answer_format(form, shows_reasoning=False))[0] == expected[1:]


@pytest.mark.parametrize(
    ("arguments", "shown"), [('{"a": oops}', '{"a": oops}}\n</tool_call>'), ('{"a": 1e400}', '{"a": 1e400}')]
)
def test_call_with_malformed_arguments_is_text(arguments, shown):
    expected = [text('Look. {"name": "get", "arguments": ' + shown)]
    assert checked(f"Look. {CALL % arguments}") == (expected, "end_turn")


def test_half_surrogate_pair_in_arguments_is_replaced():
    blocks, reason = checked(CALL % r'{"a": "half \ud83d"}')
    assert (blocks, reason) == ([{**GET, "input": {"a": "half \ufffd"}}], "tool_use")


def test_whole_calls_beside_a_malformed_one_are_made():
    blocks, reason = checked(CALL % "{oops}" + CALL % '{"a": "b"}')
    assert ([block["type"] for block in blocks], reason) == (["text", "tool_use"], "tool_use")
    assert blocks[1] == GET


@pytest.mark.parametrize("form", [None, GRAMMAR])
def test_call_that_the_limit_cuts_off_is_a_block_without_input(form):
    answer = '<tool_call>\n{"name": "get", "arguments": {"a": "b'
    assert checked(answer, answer_format(form), "length") == ([{**GET, "input": {}}], "max_tokens")
    events = message_of([answer], answer_format(form), "length")[1]
    assert streamed_blocks(events) == [{**GET, "input": '{"a": "b'}]


def test_call_that_a_stop_sequence_cuts_off_is_text():
    answer = '{"name": "get", "arguments": {"a": "b'
    assert checked("<tool_call>\n" + answer) == ([text(answer)], "end_turn")


def test_arguments_that_a_grammar_holds_are_streamed_as_they_arrive():
    parts = ['<tool_call>\n{"name": "get", "arguments": {', '"a": ', '"b"}}\n</tool_call>']
    for form, expected in ((GRAMMAR, ["{", '"a": ', '"b"}']), (None, ['{"a": "b"}'])):
        events = message_of(parts, answer_format(form), "stop")[1]
        deltas = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
        assert deltas == expected
