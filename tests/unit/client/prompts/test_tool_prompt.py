"""Tools for chat templates that know none: described in a message, with calls and results as text."""

import asyncio
import json
import logging

import pytest
from support.tiny_tokenizers import byte_level
from transformers import PreTrainedTokenizerFast

from vllm_mp.client.prompts.chat_template import ChatTemplate, ChatTemplateError
from vllm_mp.client.prompts.tool_prompt import knows_tools, with_text_for_tools
from vllm_mp.client.tool_parsers import CallArguments, CallStart, HermesToolParser, Tool

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{% endif %}" + PLAIN
OWN = PLAIN + "{% if tools %}own tools: {{ tools | length }}{% endif %}"
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
USER = {"role": "user", "content": "Hi."}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "é"}'}}
TURNS = [
    USER,
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL, {**CALL, "id": "2"}]},
    {"role": "tool", "tool_call_id": "1", "content": "a"},
    {"role": "tool", "tool_call_id": "2", "content": "b"},
    {"role": "user", "content": "And?"},
]


@pytest.fixture
def render():
    """A function that renders messages in a template."""

    def render(template: str, messages: list[dict], **options) -> str:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level())
        tokenizer.chat_template = template
        return asyncio.run(ChatTemplate(tokenizer).render(messages, **options))

    return render


def test_tools_are_described_in_a_system_message(render):
    text = render(PLAIN, [USER], tools=TOOLS)
    assert text.startswith("<system>")
    assert json.dumps(TOOLS[0]) in text
    assert text.endswith("</system><user>Hi.</user>")


def test_description_follows_the_system_message_of_the_request(render):
    text = render(PLAIN, [{"role": "system", "content": "Be short."}, USER], tools=TOOLS)
    assert text.startswith("<system>Be short.\n\n")
    assert text.count("<system>") == 1


def test_description_begins_the_first_message_of_the_user_if_the_template_refuses_a_system_message(render):
    text = render(NO_SYSTEM, [USER], tools=TOOLS)
    assert text.startswith("<user>You can call functions.")
    assert text.endswith("\n\nHi.</user>")
    with pytest.raises(ChatTemplateError, match="no system message"):
        render(NO_SYSTEM, [{"role": "system", "content": "Be short."}, USER], tools=TOOLS)


@pytest.mark.parametrize("tools", [TOOLS, None])
def test_calls_and_results_are_text_in_turns_that_alternate(render, tools):
    text = render(PLAIN, TURNS, tools=tools)
    _, _, turns = text.rpartition("<user>Hi.</user>")
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
    results = [f'<tool_response>\n{{"name": "look", "content": "{text}"}}\n</tool_response>' for text in "ab"]
    assert turns == f"<assistant>I look.\n{call}\n{call}</assistant><user>{results[0]}\n{results[1]}\nAnd?</user>"
    pieces = HermesToolParser([Tool("look")]).feed(turns)
    assert [piece.name for piece in pieces if isinstance(piece, CallStart)] == ["look", "look"]
    assert [piece.text for piece in pieces if isinstance(piece, CallArguments)] == ['{"at": "é"}'] * 2


def test_template_that_knows_tools_gets_them_as_they_are(render):
    assert render(OWN, [USER], tools=TOOLS) == "<user>Hi.</user>own tools: 1"
    assert knows_tools(OWN)
    assert not knows_tools(PLAIN)


def test_without_the_fallback_the_template_gets_what_the_request_has(render):
    assert render(PLAIN, TURNS, tools=TOOLS, tool_fallback=False).count("<tool>") == 2


def test_conversation_without_tools_is_rendered_as_it_is(render):
    two = [USER, USER]
    assert render(PLAIN, two) == "<user>Hi.</user><user>Hi.</user>"
    assert (
        with_text_for_tools([{"role": "assistant", "content": "x"}], TOOLS, in_system_message=False)[0]["role"]
        == "system"
    ), "there is no message of a user to begin"


def test_log_says_once_that_the_template_knows_no_tools(caplog):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level())
    tokenizer.chat_template = PLAIN
    template = ChatTemplate(tokenizer)
    with caplog.at_level(logging.WARNING):
        asyncio.run(template.render([USER]))
        assert not caplog.records
        for _ in range(3):
            asyncio.run(template.render([USER], tools=TOOLS))
    assert [record.getMessage().count("--no-tool-fallback") for record in caplog.records] == [1]
