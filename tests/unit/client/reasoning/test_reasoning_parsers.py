"""The thought of a model is split from its answer, wherever the text is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.answer_texts import divisions, parsed, parts_of, split, tool_parser

from vllm_mp.client.answer_parser import AnswerParser, ParsedAnswer
from vllm_mp.client.reasoning import REASONING_PARSERS, ReasoningPiece

QWEN3, QWEN3_OFF = "<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"
R1 = "<｜Assistant｜><think>\n"


@pytest.mark.parametrize(
    ("name", "prompt", "text", "reasoning", "content"),
    [
        (
            "qwen3",
            QWEN3,
            "<think>\nTwo lines,\n\nthen more.\n</think>\n\nThe answer.\n",
            "Two lines,\n\nthen more.",
            "The answer.\n",
        ),
        ("qwen3", QWEN3, "<think>\n\n</think>\n\nThe answer.", "", "The answer."),
        ("qwen3", QWEN3, " The answer, without <think>.", "", " The answer, without <think>."),
        ("qwen3", QWEN3, "\n<think>cut off\n", "cut off\n", ""),
        ("qwen3", QWEN3, "", "", ""),
        ("qwen3", QWEN3, "<thi", "", "<thi"),
        ("qwen3", QWEN3_OFF, "<think> is a tag.</think>", "", "<think> is a tag.</think>"),
        ("qwen3", QWEN3 + "<think>\n", "Thought.\n</think>\n\nThe answer.", "Thought.", "The answer."),
        ("deepseek_r1", R1, "Thought.\n</think>\n\nThe answer.", "Thought.", "The answer."),
        ("deepseek_r1", R1, "A <think> in it.</think>The </think> answer.", "A <think> in it.", "The </think> answer."),
        ("deepseek_r1", R1, "It never ends </thin", "It never ends </thin", ""),
        ("deepseek_r1", "", "<think>\nThought.\n</think>\n\nThe answer.", "Thought.", "The answer."),
        ("deepseek_r1", "", "Thought.</think>The answer.", "Thought.", "The answer."),
        ("deepseek_r1", "<think>\n\n</think>\n\n", "The answer.", "", "The answer."),
        ("mistral", "[/INST]", "[THINK]Thought.[/THINK]The answer.", "Thought.", "The answer."),
        ("mistral", "[/INST]", "The answer.", "", "The answer."),
    ],
)
def test_thought_is_split_from_the_answer(name, prompt, text, reasoning, content):
    for parts in divisions(text):
        assert parsed(REASONING_PARSERS.get(name)(prompt), parts) == ParsedAnswer(reasoning, content)


def expected(text, in_thought):
    """Return what becomes of a whole answer of Qwen3."""
    body = text.lstrip("\n") if in_thought else text.lstrip()
    if not body.startswith("<think>") and not in_thought:
        return ParsedAnswer(content=text)
    reasoning, end, content = body.removeprefix("<think>").lstrip("\n").partition("</think>")
    return ParsedAnswer(reasoning.rstrip("\n") if end else reasoning, content.lstrip("\n"))


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "\n", " ", "a", "</thin"]), max_size=12).map("".join),
    st.lists(st.integers(0, 60)),
    st.booleans(),
)
def test_any_text_is_split_alike_wherever_it_is_cut(text, cuts, in_thought):
    parser = REASONING_PARSERS.get("qwen3")(R1 if in_thought else QWEN3)
    assert parsed(parser, parts_of(text, cuts)) == expected(text, in_thought)


def test_reasoning_is_passed_on_as_it_arrives():
    parser = REASONING_PARSERS.get("qwen3")()
    assert parser.feed("<think>\nSo") == [ReasoningPiece("So")]
    assert parser.feed(" far\n") == [ReasoningPiece(" far")]
    assert parser.feed("on") == [ReasoningPiece("\non")]


def test_call_within_a_thought_is_reasoning():
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    answer = split("hermes", f"<think>\nI could write {call}\n</think>\n\n{call}", REASONING_PARSERS.get("qwen3")())
    assert answer.reasoning == f"I could write {call}"
    assert (answer.content, [call.name for call in answer.calls]) == ("", ["now"])


@pytest.mark.parametrize(
    ("name", "prompt", "may_think", "in_thought"),
    [
        ("qwen3", QWEN3, True, False),
        ("qwen3", QWEN3_OFF, False, False),
        ("qwen3", R1, True, True),
        ("mistral", "", True, False),
    ]
    + [("deepseek_r1", prompt, True, True) for prompt in ("", R1)],
)
def test_prompt_tells_whether_the_answer_begins_inside_a_thought(name, prompt, may_think, in_thought):
    parser = REASONING_PARSERS.get(name)(prompt)
    assert (parser.may_think, parser.in_thought) == (may_think, in_thought)


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
@pytest.mark.parametrize(
    ("before", "begun", "text", "reasoning", "content"),
    [
        (QWEN3, "<think>\nLet me", " see.\n</think>\n\nFour.", " see.", "Four."),
        (QWEN3_OFF, "<think>\nLet me", " see.\n</think>\n\nFour.", " see.", "Four."),
        (QWEN3, "<think>\nLet me see.\n</think>\n\nThe answer ", " is 4.", "", " is 4."),
        (QWEN3_OFF, "The answer ", " is <think>4.", "", " is <think>4."),
        ("What does <think> mean?" + QWEN3_OFF, "It begins", " a thought.", "", " a thought."),
        (QWEN3_OFF, "The tag <think> begins", " a thought.", "", " a thought."),
        (QWEN3, "<think>\nSo.\n</think>\n\nThe tag <think> begins", " a thought.", "", " a thought."),
    ],
)
def test_answer_goes_on_where_the_text_that_it_continues_ends(name, before, begun, text, reasoning, content):
    for prompt in (before + begun, before + begun.rstrip()):
        for parts in divisions(text):
            assert parsed(REASONING_PARSERS.get(name)(prompt, begun), parts) == ParsedAnswer(reasoning, content)


@pytest.mark.parametrize(("name", "is_reasoning"), [("qwen3", False), ("deepseek_r1", True)])
def test_text_without_a_thought_that_is_continued_may_be_a_thought_only_of_a_model_that_always_thinks(
    name, is_reasoning
):
    answer = parsed(REASONING_PARSERS.get(name)("Is </think> a tag?" + QWEN3 + "So", "So"), [" far"])
    assert answer == (ParsedAnswer(reasoning=" far") if is_reasoning else ParsedAnswer(content=" far"))


def test_markers_of_all_parsers_must_be_seen():
    assert AnswerParser().markers == set()
    parser = AnswerParser(REASONING_PARSERS.get("mistral")(), tool_parser("hermes"))
    assert parser.markers == {"[THINK]", "[/THINK]", "<tool_call>", "</tool_call>"}


def test_answer_without_parsers_is_content():
    assert AnswerParser().parse("<think>a</think>") == ParsedAnswer(content="<think>a</think>")
