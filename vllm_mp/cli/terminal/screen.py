"""What commands show of answers: the text as it arrives, and notes beside it that look different."""

import os
import sys
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from vllm_mp.cli.terminal.word_wrap import WordWrap


class Screen:
    """Writes answers to standard output, and notes: on a terminal dimmed between the answers, else on stderr."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdout.isatty()
        self._has_colours = self.is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._wrap = _word_wrap() if self.is_terminal else None

    def write(self, text: str) -> None:
        """Write a piece of an answer; on a terminal, lines are broken between words."""
        columns = _columns(sys.stdout)
        sys.stdout.write(self._wrap.wrapped(text, columns) if self._wrap and columns else text)
        sys.stdout.flush()

    def mark(self, text: str) -> None:
        """Write a short note within the line of an answer."""
        if not self.is_terminal:
            print(text, file=sys.stderr)
            return
        columns = _columns(sys.stdout)
        before = self._wrap.released_before(text, columns) if self._wrap and columns else " "
        sys.stdout.write(before + self._dimmed(text))
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Write a line that is not an answer."""
        self._note(_fitted(text, _columns(sys.stdout)))

    def table(self, rows: Iterable[tuple[str, str]]) -> None:
        """Write lines of two columns that are no answer."""
        rows = list(rows)
        width = max(len(left) for left, _ in rows) + 2
        columns = _columns(sys.stdout)
        room = columns and max(width, columns - width)
        self._note("\n".join(f"{left:<{width}}" + _fitted(right, room, " " * width) for left, right in rows))

    def complain(self, text: str) -> None:
        """Write what is wrong with a message or a command."""
        sys.stdout.flush()
        print_error(text)

    def _note(self, text: str) -> None:
        print(self._dimmed(text) if self.is_terminal else text, file=sys.stdout if self.is_terminal else sys.stderr)

    def _dimmed(self, text: str) -> str:
        return f"\x1b[2m{text}\x1b[22m" if self._has_colours else text


def print_error(text: str) -> None:
    """Write what is wrong to standard error; on a terminal, lines are broken between words."""
    print(_fitted(f"vllm-mp: {text}", _columns(sys.stderr)), file=sys.stderr)


def _columns(stream: TextIO | None) -> int:
    """Return the width of the terminal; 0 if `stream` is not a terminal, or the terminal does not tell its width."""
    return os.get_terminal_size(stream.fileno()).columns if stream is not None and stream.isatty() else 0


def _fitted(text: str, columns: int, margin: str = "") -> str:
    """Return `text` with line breaks between its words, and `margin` before further lines; 0 columns: without."""
    if not columns:
        return text
    lines = [textwrap.wrap(line, columns, break_long_words=False, break_on_hyphens=False) for line in text.split("\n")]
    return f"\n{margin}".join(part for line in lines for part in line or [""])


def _word_wrap() -> "WordWrap":
    from vllm_mp.cli.terminal.word_wrap import WordWrap  # imports the line editor's library, which a pipe does not need

    return WordWrap()
