"""Messages as OpenAI's API writes them become what chat templates read."""

import msgspec
import pytest

from vllm_mp.client.prompts import chat_messages
from vllm_mp.client.prompts.chat_messages import ChatMessageError, template_messages


class Message(msgspec.Struct):
    role: str
    content: str | None = None
    name: str | None = None


def convert(*messages, knows_developer=False):
    return template_messages(list(messages), knows_developer=knows_developer)


def test_parts_of_a_text_are_joined_and_fields_for_templates_are_kept():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    (message,) = convert({"role": "user", "content": parts, "name": "Ann", "mood": "gay", "type": "message"})
    assert message == {"role": "user", "content": "one\ntwo", "name": "Ann", "mood": "gay"}


def test_structs_are_converted_as_dicts_are():
    assert convert(Message("user", "Hello")) == [{"role": "user", "content": "Hello"}]


def test_developer_is_the_system_unless_the_template_knows_the_role():
    message = {"role": "developer", "content": "Be brief."}
    assert convert(message)[0]["role"] == "system"
    assert convert(message, knows_developer=True)[0]["role"] == "developer"


def test_refusal_stands_for_the_content():
    assert convert({"role": "assistant", "content": None, "refusal": "No."}) == [
        {"role": "assistant", "content": "No."}
    ]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_thought_is_given_to_templates_under_both_of_its_names(name):
    (message,) = convert({"role": "assistant", "content": "Yes.", name: "I must agree."})
    assert (message["reasoning"], message["reasoning_content"]) == ("I must agree.", "I must agree.")


def test_answer_that_is_only_a_thought_has_an_empty_content():
    (message,) = convert({"role": "assistant", "content": None, "reasoning_content": "Hm."})
    assert (message["content"], message["reasoning"]) == ("", "Hm.")


@pytest.mark.parametrize("arguments", ['{"city": "Oslo"}', {"city": "Oslo"}])
def test_arguments_of_calls_are_objects(arguments):
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    (message,) = convert({"role": "assistant", "content": None, "tool_calls": [call]})
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}
    assert message["content"] == ""


def test_half_surrogate_pairs_in_arguments_are_replaced():
    text = r'{"a": "\ud83d", "b": "\uD83D\uDE00\udc00", "c": "\\ud83d \\\ud83d", "d": "\ud83d\ud83d\ude00"}'
    (message,) = convert({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]})
    arguments = message["tool_calls"][0]["function"]["arguments"]
    assert arguments == {"a": "\ufffd", "b": "😀\ufffd", "c": "\\ud83d \\\ufffd", "d": "\ufffd😀"}


@pytest.mark.parametrize("arguments", ['{"city": "Os', "[1]", "null", '"x"', " ", '{"a":' * 5000, [1]])
def test_arguments_that_are_no_object_are_an_empty_object(arguments, caplog):
    """A client sends back what a model wrote, which `max_tokens` may have cut off."""
    chat_messages._warn_of_malformed_arguments.cache_clear()
    call = {"function": {"name": "f", "arguments": arguments}}
    (message,) = convert({"role": "assistant", "tool_calls": [call, call]})
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [{}, {}]
    assert len(caplog.records) == 1


CALL = {"function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("messages", "path", "said"),
    [
        ([], "messages", "messages is empty"),
        (["Hello"], "messages[0]", "must be a dict with a 'role'"),
        ([{"content": "Hello"}], "messages[0]", "must be a dict with a 'role'"),
        ([{"role": "user"}], "messages[0].content", "is missing; give a text"),
        ([{"role": "user", "reasoning_content": "Hm."}], "messages[0].content", "is missing; give a text"),
        ([{"role": "assistant", "reasoning_content": ""}], "messages[0].content", "is missing; give a text"),
        ([{"role": "user", "content": 5}], "messages[0].content", "must be a text or a list of parts, got 5"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0]",
            "must be a part of type 'text'",
        ),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "messages[0].tool_calls", "needs the role"),
        ([{"role": "assistant", "tool_calls": [5]}], "messages[0].tool_calls[0].function.arguments", "is missing in 5"),
        ([{"role": "user", "content": object()}], "messages", "must consist of dicts, lists and plain values"),
    ],
)
def test_message_that_no_template_can_use_is_refused_with_its_place(messages, path, said):
    with pytest.raises(ChatMessageError, match=said) as caught:
        convert(*messages)
    assert caught.value.path == path
