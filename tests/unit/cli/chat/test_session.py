"""A chat whose answers fail."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from vllm_mp import CompletionOutput, EngineDeadError, EngineGenerateError
from vllm_mp.cli.chat.conversation import Conversation
from vllm_mp.cli.chat.session import ChatSession
from vllm_mp.cli.terminal import screen
from vllm_mp.cli.terminal.word_wrap import WordWrap


class Engine:
    """A stand-in whose answers end with `error` after some words."""

    model_config = SimpleNamespace(max_model_len=100, images=None)

    def __init__(self, error):
        self._error = error

    def last_core_status(self):
        return {"incarnation": 1}

    @property
    def model_tokenizer(self):
        return self

    chat_template = "a template"

    def apply_chat_template(self, _messages, **_options):
        return ""

    def encode(self, _text, **_options):
        return [1]

    async def generate(self, _prompt, _params, lora_request=None):
        yield SimpleNamespace(outputs=[CompletionOutput(0, "The fox jumped over the lazy", [1])])
        raise self._error


class Lines:
    """Stands in for the user's line."""

    def while_busy(self):
        return contextlib.nullcontext()


@pytest.fixture
def session(monkeypatch):
    """A function that returns a chat on a terminal of 30 columns, whose answers end with an error."""
    monkeypatch.setattr(screen, "_columns", lambda _stream: 30)
    with asyncio.Runner() as runner:

        def session(error):
            terminal = screen.Screen()
            terminal._wrap = WordWrap()
            return ChatSession(runner, Engine(error), Conversation(None, {}), terminal)

        yield session


def test_all_words_are_shown_when_the_engine_ends_for_good(session, capsys):
    with pytest.raises(EngineDeadError, match="gone"):
        session(EngineDeadError("gone")).ask("Hi", Lines())
    assert capsys.readouterr().out == "The fox jumped over the lazy\n"


def test_answer_that_fails_alone_does_not_end_the_chat(session, capsys):
    chat = session(EngineGenerateError("the logits are not finite"))
    chat.ask("Hi", Lines())
    assert capsys.readouterr() == ("The fox jumped over the lazy\n", "vllm-mp: the logits are not\nfinite\n")
    assert chat.conversation.messages == []
