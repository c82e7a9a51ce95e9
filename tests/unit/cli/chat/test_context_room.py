"""Which turns of a conversation are dropped so that the answer has room in the context."""

from itertools import pairwise

import pytest

from vllm_mp.cli.chat.context_room import make_room
from vllm_mp.cli.chat.conversation import Conversation

SYSTEM = "s" * 9


def tokenize(messages):
    """A token for each character, with one more for each message."""
    return [ord(letter) for message in messages for letter in message["content"] + "\n"]


def question(length, text="?"):
    return {"role": "user", "content": f"{text:<{length - 1}}"}


def turn(text):
    """A question and an answer of 10 tokens in all."""
    return [question(5, text), {"role": "assistant", "content": f"{text:<4}"}]


def conversation(*messages, max_tokens=None):
    return Conversation(SYSTEM, {"max_tokens": max_tokens}, list(messages))


def test_conversation_with_room_for_the_answer_is_kept_whole():
    messages = [*turn("a"), *turn("b"), question(45)]
    chat = conversation(*messages)
    assert len(tokenize(chat.to_send())) == 75
    assert make_room(chat, tokenize, 100) == 0
    assert chat.messages == messages


def test_quarter_of_the_context_is_kept_for_the_answer_or_less_if_less_is_wanted():
    messages = [*turn("a"), *turn("b"), question(46)]
    assert make_room(conversation(*messages), tokenize, 100) > 0
    assert make_room(conversation(*messages, max_tokens=25), tokenize, 100) > 0
    assert make_room(conversation(*messages, max_tokens=24), tokenize, 100) == 0


def test_oldest_turns_are_dropped_whole_and_the_system_message_stays():
    turns = [message for name in "abcdef" for message in turn(name)]
    chat = conversation(*turns, question(10))
    assert make_room(chat, tokenize, 100) == 3
    assert chat.to_send() == [{"role": "system", "content": SYSTEM}, *turns[6:], question(10)]


def test_answer_never_stays_without_its_question():
    greeting = {"role": "assistant", "content": "g" * 9}
    lookup = [question(10), {"role": "assistant", "content": "call"}, {"role": "tool", "content": "t" * 34}]
    chat = conversation(greeting, *lookup, *turn("b"), question(10))
    assert make_room(chat, tokenize, 100) == 1
    assert chat.messages == [*turn("b"), question(10)]


def test_turns_are_dropped_in_a_large_step_so_that_the_prefix_stays_for_several_turns():
    chat, prompts = conversation(), []
    for number in range(40):
        asked, answered = turn(f"{number}")
        chat.messages.append(asked)
        make_room(chat, tokenize, 200)
        prompts.append("".join(map(chr, tokenize(chat.to_send()))))
        chat.messages.append(answered)
    assert max(map(len, prompts)) <= 150
    num_changes = sum(not later.startswith(earlier) for earlier, later in pairwise(prompts))
    assert 0 < num_changes <= 6, "with a turn at a time, the prefix would change with 26 of the 40 turns"


def test_message_that_is_too_long_alone_is_refused_with_its_length_and_the_limit():
    messages = [*turn("a"), question(70)]
    chat = conversation(*messages)
    with pytest.raises(ValueError, match=r"too long: 80 tokens .* limit is 75, .* 25 tokens of the context of 100"):
        make_room(chat, tokenize, 100)
    assert chat.messages == messages


def test_long_message_drops_only_what_its_answer_needs():
    chat = conversation(*turn("a"), *turn("b"), question(50))
    assert make_room(chat, tokenize, 100) == 1
    assert chat.messages == [*turn("b"), question(50)]
