"""The items of /v1/responses become the messages of a chat template, or are refused with the path of the fault."""

import msgspec
import pytest

from vllm_mp.server.http.errors import ApiError
from vllm_mp.server.openai.responses.input import InputItem, chat_messages, turn_starts, without_older_turns


def messages(input, instructions=None):
    if not isinstance(input, str):
        input = msgspec.convert(input, list[InputItem])
    return [{"role": message.role, "content": message.content} for message in chat_messages(input, instructions)]


def refused(input):
    with pytest.raises(ApiError) as caught:
        messages(input)
    assert caught.value.status == 400
    return caught.value


def user(content):
    return {"role": "user", "content": content}


def system(content):
    return {"role": "system", "content": content}


def test_string_is_the_message_of_a_user():
    assert messages("Hello") == [user("Hello")]


def test_instructions_and_leading_system_messages_become_one_system_message():
    items = [{"role": "developer", "content": "Be kind."}, {"role": "system", "content": "Be short."}, user("Hello")]
    assert messages(items, "Be true.") == [system("Be true.\n\nBe kind.\n\nBe short."), user("Hello")]


def test_later_system_messages_keep_their_place():
    items = [user("Hello"), {"role": "developer", "content": "Be short."}, user("Go on")]
    assert messages(items, "Be true.") == [system("Be true."), *items]


def test_parts_of_text_are_joined_by_line_breaks():
    parts = [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]
    assert messages([user(parts)]) == [user("one\ntwo")]


def test_output_of_a_response_may_be_sent_back_as_it_came():
    items = [
        user("What is 2 + 2?"),
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "sum"}], "status": None},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "4", "annotations": [], "logprobs": []}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        user("And 3 + 3?"),
    ]
    assert messages(items) == [
        user("What is 2 + 2?"),
        {"role": "assistant", "content": "4"},
        {"role": "assistant", "content": "No."},
        user("And 3 + 3?"),
    ]


def test_thought_text_and_calls_of_an_answer_are_one_message():
    items = [
        user("How is the weather?"),
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "I must look."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "f", "arguments": '{"city": "Bern"}'},
        {"type": "function_call", "id": "fc_2", "call_id": "b", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "sunny"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "rain"}]},
        {"type": "function_call", "id": "fc_3", "call_id": "c", "name": "g", "arguments": "{}"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "No more."}]},
    ]
    _, answer, *outputs, again = chat_messages(msgspec.convert(items, list[InputItem]), None)
    assert (answer.reasoning_content, answer.content) == ("I must look.", "I look.")
    assert [(call.id, call.function.name, call.function.arguments) for call in answer.tool_calls] == [
        ("a", "f", '{"city": "Bern"}'),
        ("b", "f", "{}"),
    ]
    assert [(output.role, output.tool_call_id, output.content) for output in outputs] == [
        ("tool", "a", "sunny"),
        ("tool", "b", "rain"),
    ]
    assert (again.content, again.reasoning_content, [call.id for call in again.tool_calls]) == (None, None, ["c"])


@pytest.mark.parametrize(
    ("before", "content"), [([], "Done."), ([{"role": "assistant", "content": "Look."}], "Look.\nDone.")]
)
def test_text_after_a_call_leaves_the_call_with_its_result(before, content):
    items = [
        user("How is the weather?"),
        *before,
        {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Done."}]},
        {"type": "function_call_output", "call_id": "a", "output": "sunny"},
        {"role": "assistant", "content": "It is sunny."},
    ]
    _, answer, output, last = chat_messages(msgspec.convert(items, list[InputItem]), None)
    assert (answer.content, [call.id for call in answer.tool_calls]) == (content, ["a"])
    assert (output.role, output.tool_call_id, last.content) == ("tool", "a", "It is sunny.")


@pytest.mark.parametrize("arguments", [r'{"a": "\ud83d"}', '{"a": "Be'])
def test_malformed_arguments_may_be_sent_back(arguments):
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    _, answer = chat_messages(msgspec.convert([user("a"), call], list[InputItem]), None)
    assert answer.tool_calls[0].function.arguments == call["arguments"]


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([], "input"),
        ([{"role": "system", "content": "Be kind."}], "input"),
        ([user("a"), {"role": "tool", "content": "b"}], "input[1].role"),
        ([{"content": "b"}], "input[0].role"),
        ([{"role": "user"}], "input[0].content"),
        ([user([{"type": "input_text", "text": "a"}, {"type": "input_image"}])], "input[0].content[1].image_url"),
        ([user([{"type": "input_text"}])], "input[0].content[0].text"),
        ([user([{"type": "refusal", "text": "a"}])], "input[0].content[0].refusal"),
        ([user("a"), {"type": "computer_call", "call_id": "c"}], "input[1].type"),
        ([user("a"), {"type": "function_call_output", "call_id": "c"}], "input[1].output"),
        ([user("a"), {"type": "function_call_output", "output": "d"}], "input[1].call_id"),
        ([{"type": "function_call", "call_id": "c", "arguments": "{}"}], "input[0].name"),
        ([{"type": "function_call", "call_id": "c", "name": "f"}], "input[0].arguments"),
        ([{"type": "item_reference", "id": "msg_1"}], "input[0].type"),
    ],
)
def test_item_that_is_not_served_is_refused_with_its_path(items, param):
    assert refused(items).param == param


def test_a_cut_keeps_whole_turns_and_all_system_messages():
    turns = [system("s"), user("a"), {"role": "assistant", "content": "b"}, user("c"), system("t"), user("d")]
    given = chat_messages(msgspec.convert(turns, list[InputItem]), None)
    assert turn_starts(given) == [0, 3, 5]
    rests = [[message.content for message in without_older_turns(given, start)] for start in turn_starts(given)]
    assert rests == [["s", "a", "b", "c", "t", "d"], ["s", "c", "t", "d"], ["s", "t", "d"]]
