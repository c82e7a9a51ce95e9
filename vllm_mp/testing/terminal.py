"""The `vllm-mp` command on a terminal, where Ctrl-C and Ctrl-D work as they do for a user."""

import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from typing import Self

import pyte

TAKE_TERMINAL = (
    "import fcntl, os, sys, termios\n"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"
)
"""Code that makes standard input the terminal of this session, and becomes the command."""


class Terminal:
    """A command on a terminal, which is killed at the end of the context. The base of terminals that tests can read."""

    def __init__(self, arguments: Sequence[str], size: tuple[int, int] = (0, 0), **environment: str) -> None:
        """`size` is the number of lines and of columns; 0: the terminal does not tell it."""
        self.master, terminal = pty.openpty()
        termios.tcsetwinsize(terminal, size)
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKE_TERMINAL, "-m", "vllm_mp.cli", *arguments],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            env=os.environ | environment,
        )
        os.close(terminal)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def read(self, deadline: float) -> bytes | None:
        """Return what the command has written since the last call, as soon as there is something.

        Return None after `deadline`, a value of time.monotonic. Raises OSError after the end of the command.
        """
        ready, _, _ = select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))
        return os.read(self.master, 65_536) if ready else None


class EmulatedTerminal(Terminal):
    """A terminal that can move its cursor, and whose screen can be read."""

    def __init__(self, arguments: Sequence[str], size: tuple[int, int], **environment: str) -> None:
        super().__init__(arguments, size, **{"TERM": "xterm-256color"} | environment)
        lines, columns = size
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)

    @property
    def lines(self) -> list[str]:
        """The lines of the screen that are not empty."""
        return [line.rstrip() for line in self.screen.display if line.strip()]

    def until(self, condition: Callable[[list[str]], bool], timeout: float = 60.0) -> None:
        """Return when `condition(lines)` is true of the screen."""
        deadline = time.monotonic() + timeout
        while not condition(self.lines):
            data = self.read(deadline)
            assert data is not None, "\n".join(self.lines)
            self.show(data)

    def until_prompt(self, number: int) -> None:
        """Return when the screen of a chat ends with an empty prompt, and has `number` prompts."""
        self.until(lambda lines: lines[-1:] == [">"] and sum(line[:1] == ">" for line in lines) == number)

    def show(self, data: bytes) -> None:
        """Show what the command has written, and answer what it asks."""
        self._stream.feed(data)
        if b"\x1b[6n" in data:  # the line editor asks where the cursor is
            self.type(f"\x1b[{self.screen.cursor.y + 1};{self.screen.cursor.x + 1}R")
