"""Which turns of a conversation are dropped so that the answer has room in the context."""

from itertools import pairwise

import pytest

from vllm_mp.cli.chat.context_room import fit_conversation

SYSTEM = {"role": "system", "content": "s" * 10}


def tokenize(messages):
    """A token for each character, with one more for each message."""
    return [ord(letter) for message in messages for letter in message["content"] + "\n"]


def turn(name, length=10):
    """A question and an answer of `length` tokens in all."""
    return [
        {"role": "user", "content": f"{name:<{length // 2 - 1}}"},
        {"role": "assistant", "content": f"{name:<{length - length // 2 - 1}}"},
    ]


def question(length):
    return {"role": "user", "content": "?" * (length - 1)}


def test_conversation_with_room_for_the_answer_is_kept_whole():
    messages = [SYSTEM, *turn("a"), *turn("b"), question(44)]
    fitted = fit_conversation(messages, tokenize, 100, None)
    assert (fitted.messages, fitted.notice) == (messages, "")
    assert fitted.token_ids == tokenize(messages)
    assert len(fitted.token_ids) == 75


def test_quarter_of_the_context_is_kept_for_the_answer_or_less_if_less_is_wanted():
    messages = [SYSTEM, *turn("a"), *turn("b"), question(45)]
    assert fit_conversation(messages, tokenize, 100, None).notice
    assert fit_conversation(messages, tokenize, 100, 25).notice
    assert fit_conversation(messages, tokenize, 100, 24).messages == messages


def test_oldest_turns_are_dropped_whole_and_the_system_message_stays():
    turns = [message for name in "abcdef" for message in turn(name)]
    messages = [SYSTEM, *turns, question(10)]
    fitted = fit_conversation(messages, tokenize, 100, None)
    assert fitted.messages == [SYSTEM, *turns[8:], question(10)]
    assert fitted.token_ids == tokenize(fitted.messages)
    assert "4 turns were dropped" in fitted.notice
    assert len(messages) == 14, "the conversation of the caller is unchanged"


def test_answer_never_stays_without_its_question():
    greeting = {"role": "assistant", "content": "g" * 9}
    lookup = [question(10), {"role": "assistant", "content": "call"}, {"role": "tool", "content": "t" * 44}]
    fitted = fit_conversation([greeting, *lookup, *turn("b"), question(10)], tokenize, 100, None)
    assert fitted.messages == [*turn("b"), question(10)]
    assert "oldest turn was dropped" in fitted.notice


def test_turns_are_dropped_in_a_large_step_so_that_the_prefix_stays_for_several_turns():
    messages, prompts = [SYSTEM], []
    for number in range(40):
        asked, answered = turn(f"{number}")
        fitted = fit_conversation([*messages, asked], tokenize, 200, None)
        prompts.append("".join(map(chr, fitted.token_ids)))
        messages = [*fitted.messages, answered]
    changes = sum(not later.startswith(earlier) for earlier, later in pairwise(prompts))
    assert max(map(len, prompts)) <= 150
    assert 0 < changes <= 6, "a step of a single turn changes the prefix at 26 of the 40 turns"


def test_message_that_is_too_long_alone_is_refused_with_its_length_and_the_limit():
    messages = [SYSTEM, *turn("a"), question(70)]
    with pytest.raises(ValueError, match=r"too long: 81 tokens .* the limit is 75, .* 25 of the context's 100 tokens"):
        fit_conversation(messages, tokenize, 100, None)
    assert fit_conversation([SYSTEM, *turn("a"), question(60)], tokenize, 100, None).messages == [SYSTEM, question(60)]
