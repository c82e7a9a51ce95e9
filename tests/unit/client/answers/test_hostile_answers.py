"""Answers that no model should write: tool parsers never fail, lose or double text, or slow down."""

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.answer_texts import in_order, parsed, parts_of, pieces_of, tool_parser

from vllm_mp.client.tool_parsers import TOOL_PARSERS, CallEnd, CallStart

NAMES = [*TOOL_PARSERS.names(), "named"]
CALLS = {
    "hermes": '<tool_call>\n{"name": "get", "arguments": {"a": [1]}}\n</tool_call>',
    "llama3_json": '<|python_tag|>{"name": "get", "parameters": {"a": [1]}}',
    "mistral": '[TOOL_CALLS][{"name": "get", "arguments": {"a": [1]}}]',
    "qwen3_coder": "<tool_call>\n<function=get>\n<parameter=a>\n[1]\n</parameter>\n</function>\n</tool_call>",
    "pythonic": "<|python_start|>[get(a=[1])]<|python_end|>",
}
FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<function=get>", "<function=", "<parameter=a>", "</parameter>", "</function>"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|python_start|>", "<|python_end|>", "[get(", "[now()"),
    *('"name": "get"', '"arguments": {', '"parameters": {', '"a": "b"', '"id": "x"', '{"name": "get", "arguments": {'),
    *"()[]{},:;'\"\\=1-.x <é😀\n\0",
    *("a=", "\\u00", "e5", "true", "Non", "\n{", "\n["),
]
HOSTILE = st.lists(st.sampled_from(FRAGMENTS), max_size=30).map("".join)
CUTS = st.lists(st.integers(0, 120), max_size=10)
PLAIN = ["", "b", " <", "[ ", '{"a', "'\n", "\n\n[b", "\n{b"]
BROKEN = ["<tool_call>", '<tool_call>{"name": "nobody"}', "[TOOL_CALLS]x", "<function=nobody>", "<|python_tag|>x"]


def is_subsequence(part, whole):
    characters = iter(whole)
    return all(character in characters for character in part)


@pytest.mark.parametrize("name", NAMES)
@given(HOSTILE, CUTS)
def test_any_text_gives_the_same_pieces_wherever_it_is_cut(name, text, cuts):
    answer, order = in_order(pieces_of(tool_parser(name), [text]))
    assert in_order(pieces_of(tool_parser(name), parts_of(text, cuts))) == (answer, order)
    assert in_order(pieces_of(tool_parser(name), list(text))) == (answer, order)
    assert order.count(CallStart) == order.count(CallEnd) == len(answer.calls)
    assert is_subsequence(answer.content, text)
    if not answer.calls:
        assert answer.content == text
    assert all(isinstance(json.loads(call.arguments), dict) for call in answer.calls if call.complete)


@pytest.mark.parametrize("name", CALLS)
@given(st.lists(st.sampled_from([*PLAIN, *BROKEN, None, None, None]), max_size=8), CUTS)
def test_calls_among_other_text_leave_all_of_it(name, segments, cuts):
    """None stands for a call."""
    text = "\n".join(CALLS[name] if segment is None else f"a{segment}." for segment in segments)
    answer = parsed(tool_parser(name), parts_of(text, cuts))
    assert [(call.name, call.complete) for call in answer.calls] == [("get", True)] * segments.count(None)
    expected = "\n".join("\0" if segment is None else f"a{segment}." for segment in segments)
    # Whitespace between calls, before the first and after the last belongs to the calls.
    between = [part if part.strip() else "" for part in expected.split("\0")]
    assert answer.content == "".join(between)


REPEATED = {
    "hermes": ["<tool_call>", '<tool_call>{"arguments": ', '<tool_call>{"name": "get"', "<", "\n ", '{"a":'],
    "llama3_json": ["\n{", "<|python_tag|>", '{"name": "get", "parameters": {}};', ";\n"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS][", "[TOOL_CALLS]get[CALL_ID]", '[TOOL_CALLS][{"name": "get"},'],
    "qwen3_coder": ["<tool_call>\n", "<function=get>", "<function=get><parameter=a>\n", "<function=get><parameter="],
    "pythonic": ["\n[", "\n[get(", "[get(a=[", "[get(a=1", '[get(a="\\', "[get(a='''", "[get(a=\"b', "],
    "json": ['[{"name": "get", "parameters": {"a": "', '[{"parameters": ', "[\n"],
    "named": ['{"a": [', '{"a": "\\u0041', " "],
}


@pytest.mark.parametrize(("name", "unit"), [(name, unit) for name in REPEATED for unit in REPEATED[name]])
def test_work_grows_with_the_length_of_the_answer_and_no_faster(name, unit):
    for whole in (False, True):
        short, long = (calls_made(name, unit * times, whole) for times in (40, 160))
        assert long <= 4.5 * short + 300


def calls_made(name, text, whole):
    """Return the number of functions called, in Python and C, while an answer is parsed whole or by character."""
    parser, calls = tool_parser(name), 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        for part in [text] if whole else text:
            parser.feed(part)
        parser.finish()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize(("name", "unit"), [(name, unit) for name in REPEATED for unit in REPEATED[name]])
def test_text_that_was_read_is_not_copied_when_more_arrives(name, unit):
    parser = tool_parser(name)
    for character in unit * 50:
        parser.feed(character)
        assert len(parser.answer._text) < 40
