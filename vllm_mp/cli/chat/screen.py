"""What the chat writes: answers, and notes beside them that look different from answers."""

import os
import sys


class Screen:
    """Writes answers to standard output, and notes: on a terminal dimmed between the answers, else on stderr."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdout.isatty()
        self._has_colours = self.is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def write(self, text: str) -> None:
        """Write a piece of an answer at once."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Write a line that is no answer."""
        print(self.dimmed(text) if self.is_terminal else text, file=sys.stdout if self.is_terminal else sys.stderr)

    def complain(self, text: str) -> None:
        """Write what is wrong with a message or a command."""
        sys.stdout.flush()
        print(f"vllm-mp: {text}", file=sys.stderr)

    def dimmed(self, text: str) -> str:
        return f"\x1b[2m{text}\x1b[22m" if self._has_colours else text
