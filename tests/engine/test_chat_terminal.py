"""The chat on a terminal that can move its cursor, seen through a terminal emulator."""

import re

import pytest

from vllm_mp.testing.engines import replay_core
from vllm_mp.testing.terminal import EmulatedTerminal


def chat(columns, arguments, state_folder):
    return EmulatedTerminal(["chat", *arguments], (40, columns), XDG_STATE_HOME=str(state_folder))


@pytest.fixture(scope="module")
def address(default_model, tmp_path_factory):
    # The answer of 8,000 tokens lasts longer than any test.
    with replay_core(tmp_path_factory.mktemp("replay"), "--rate", "100") as address:
        yield address


@pytest.mark.parametrize("columns", [80, pytest.param(120, marks=pytest.mark.slow)])
def test_chat_on_a_terminal_edits_completes_and_remembers_messages(address, tmp_path, columns):
    arguments = ["--connect", address, "--max-tokens", "12"]
    with chat(columns, arguments, tmp_path) as terminal:
        terminal.until_prompt(1)
        assert terminal.lines[1] == "/help lists commands, Ctrl-C stops an answer, /bye or Ctrl-D leaves the chat."
        terminal.type("Hxi\x1b[D\x1b[D\x1b[3~\r")  # two steps to the left, delete
        terminal.until_prompt(2)
        assert "> Hi" in terminal.lines
        terminal.type("\x1b[200~A list:\rapples\rpears\x1b[201~")  # a pasted text of three lines
        terminal.until(lambda lines: lines[-3:] == ["> A list:", "… apples", "… pears"])
        terminal.type("\r")
        terminal.until_prompt(3)
        terminal.type("/sho")
        terminal.until(lambda lines: lines[-1].strip() == "/show")  # the menu of completions
        terminal.type("\t")
        terminal.until(lambda lines: "> /show" in lines)
        terminal.type("\r")
        terminal.until_prompt(4)
        assert "messages    4" in terminal.lines
        terminal.type("\x1b[A\x1b[A\x1b[A\x1b[A\x1b[A")  # the messages before, up to the first
        terminal.until(lambda lines: lines[-1] == "> Hi")
        terminal.type("\x03/nothing\r")
        terminal.until(lambda lines: "there is no command /nothing" in " ".join(lines) and lines[-1] == ">")
        terminal.type("\x04")
        assert terminal.process.wait(30) == 0
    history = tmp_path / "vllm_mp/chat_history"
    assert history.stat().st_mode & 0o777 == 0o600
    with chat(columns, arguments, tmp_path) as terminal:
        terminal.until_prompt(1)
        terminal.type("\x1b[A\x1b[A")
        terminal.until(lambda lines: lines[-1] == "> /show")


def test_keys_typed_during_an_answer_come_to_the_next_prompt(address, tmp_path):
    arguments = ["--connect", address, "--ignore-eos", "--max-tokens", "8000", "--verbose"]
    with chat(80, arguments, tmp_path) as terminal:
        terminal.until_prompt(1)
        terminal.type("Hi\r")
        terminal.until(lambda lines: lines[-1] not in (">", "> Hi"))  # the answer has begun
        terminal.type("next\x1b[Dmessage")
        terminal.type("\x03")
        terminal.until(lambda lines: lines[-1] == "> nextmessage")
        assert any(line.endswith("[stopped]") for line in terminal.lines)
        assert any(re.search(r"\d+ tokens?, .*first token after", line) for line in terminal.lines)
