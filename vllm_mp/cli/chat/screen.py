"""What the chat writes: answers, and notes beside them that look different from answers."""

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_mp.cli.chat.word_wrap import WordWrap


class Screen:
    """Writes answers to standard output, and notes: on a terminal dimmed between the answers, else on stderr."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdout.isatty()
        self._has_colours = self.is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._wrap = _word_wrap() if self.is_terminal else None

    def write(self, text: str) -> None:
        """Write a piece of an answer; on a terminal, lines are broken between words."""
        columns = self._columns()
        sys.stdout.write(self._wrap.wrapped(text, columns) if self._wrap and columns else text)
        sys.stdout.flush()

    def mark(self, text: str) -> None:
        """Write a short note within the line of an answer."""
        if not self.is_terminal:
            print(text, file=sys.stderr)
            return
        columns = self._columns()
        before = self._wrap.released_before(text, columns) if self._wrap and columns else " "
        sys.stdout.write(before + self._dimmed(text))
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Write a line that is no answer."""
        print(self._dimmed(text) if self.is_terminal else text, file=sys.stdout if self.is_terminal else sys.stderr)

    def complain(self, text: str) -> None:
        """Write what is wrong with a message or a command."""
        sys.stdout.flush()
        print(f"vllm-mp: {text}", file=sys.stderr)

    def _dimmed(self, text: str) -> str:
        return f"\x1b[2m{text}\x1b[22m" if self._has_colours else text

    def _columns(self) -> int:
        """Return the width of the terminal; 0 if standard output is none, or does not tell its width."""
        return os.get_terminal_size(sys.stdout.fileno()).columns if self.is_terminal else 0


def _word_wrap() -> "WordWrap":
    from vllm_mp.cli.chat.word_wrap import WordWrap  # imports the line editor's library, which a pipe does not need

    return WordWrap()
