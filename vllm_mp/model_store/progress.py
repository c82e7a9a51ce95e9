"""The progress of long work: a bar on a terminal, plain lines elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Say = Callable[[str], None]
"""A function that takes a line of text."""
Show = Callable[[float], None]
"""A function that takes the fraction of the task that is done, 0.0 to 1.0."""
_FORMS = ("{desc} {percentage:3.0f}%|{bar}| {elapsed}", "{desc} {percentage:3.0f}%|{bar}|", "{desc} {percentage:3.0f}%")
"""What a bar shows, from much to little; see `FittedBar`."""


class Progress:
    """Announces tasks on stderr, or to `say` if it is given.

    Nothing is written to stdout, which belongs to the completion that the user asked for.
    """

    def __init__(self, say: Say | None = None) -> None:
        self._say = say

    def line(self, text: str) -> None:
        """Announce `text` on a line of its own."""
        if self._say is not None:
            self._say(text)
        else:
            print(text, file=sys.stderr, flush=True)

    @contextmanager
    def task(self, text: str) -> Iterator[Show]:
        """Announce a task, and yield a function that takes the fraction done so far, 0.0 to 1.0.

        The fraction moves a bar on a terminal. Elsewhere it is ignored, and the line is all that is written.
        """
        if self._say is not None or not sys.stderr.isatty():
            self.line(text)
            yield lambda _fraction: None
            return
        from vllm_mp.machine.fitted_bar import FittedBar

        with FittedBar(total=1.0, desc=text, forms=_FORMS) as bar:

            def show(fraction: float) -> None:
                bar.update(min(max(fraction, bar.n), 1.0) - bar.n)

            yield show
            show(1.0)
