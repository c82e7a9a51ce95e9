"""The chat on a terminal that can move its cursor, seen through a terminal emulator."""

import os
import pty
import re
import select
import subprocess
import sys
import termios
import time

import pyte
import pytest

from vllm_mp.testing.engines import replay_core

_TAKE_TERMINAL = (
    "import fcntl, os, sys, termios\n"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"
)


class EmulatedTerminal:
    """A command on a terminal of 40 lines, whose screen can be read."""

    def __init__(self, columns, arguments, state_folder):
        self._master, terminal = pty.openpty()
        termios.tcsetwinsize(terminal, (40, columns))
        self.screen = pyte.Screen(columns, 40)
        self._stream = pyte.ByteStream(self.screen)
        os.set_blocking(self._master, False)
        environment = os.environ | {
            "TERM": "xterm-256color",
            "XDG_STATE_HOME": str(state_folder),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL, "-m", "vllm_mp.cli", *arguments],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            env=environment,
        )
        os.close(terminal)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    @property
    def lines(self):
        """The lines of the screen that are not empty."""
        return [line.rstrip() for line in self.screen.display if line.strip()]

    def type(self, text):
        os.write(self._master, text.encode())

    def until(self, condition, timeout=60):
        """Return when `condition(lines)` is true of the screen."""
        deadline = time.monotonic() + timeout
        while not condition(self.lines):
            ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "\n".join(self.lines)
            data = os.read(self._master, 65_536)
            self._stream.feed(data)
            if b"\x1b[6n" in data:  # the line editor asks where the cursor is
                self.type(f"\x1b[{self.screen.cursor.y + 1};{self.screen.cursor.x + 1}R")

    def until_prompt(self, number):
        """Return when the screen ends with an empty prompt, and has `number` prompts."""
        self.until(lambda lines: lines[-1:] == [">"] and sum(line[:1] == ">" for line in lines) == number)


@pytest.fixture(scope="module")
def address(default_model, tmp_path_factory):
    # The answer of 8,000 tokens lasts longer than any test.
    with replay_core(tmp_path_factory.mktemp("replay"), "--rate", "100") as address:
        yield address


@pytest.mark.parametrize("columns", [80, pytest.param(120, marks=pytest.mark.slow)])
def test_chat_on_a_terminal_edits_completes_and_remembers_messages(address, tmp_path, columns):
    arguments = ["chat", "--connect", address, "--max-tokens", "12"]
    with EmulatedTerminal(columns, arguments, tmp_path) as terminal:
        terminal.until_prompt(1)
        assert "/help" in terminal.lines[0]
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
    with EmulatedTerminal(columns, arguments, tmp_path) as terminal:
        terminal.until_prompt(1)
        terminal.type("\x1b[A\x1b[A")
        terminal.until(lambda lines: lines[-1] == "> /show")


def test_keys_typed_during_an_answer_come_to_the_next_prompt(address, tmp_path):
    arguments = ["chat", "--connect", address, "--ignore-eos", "--max-tokens", "8000", "--verbose"]
    with EmulatedTerminal(80, arguments, tmp_path) as terminal:
        terminal.until_prompt(1)
        terminal.type("Hi\r")
        terminal.until(lambda lines: lines[-1] not in (">", "> Hi"))  # the answer has begun
        terminal.type("next\x1b[Dmessage")
        terminal.type("\x03")
        terminal.until(lambda lines: lines[-1] == "> nextmessage")
        assert any(line.endswith("[stopped]") for line in terminal.lines)
        assert any(re.search(r"\d+ tokens?, .*first token after", line) for line in terminal.lines)
