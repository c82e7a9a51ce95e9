"""The search for stop strings in a text that arrives in pieces."""

import re
from collections.abc import Sequence


class StopStrings:
    """Passes text on up to the first stop string, and holds back text that may be the beginning of one.

    If a piece completes several stop strings, the first counts; of several that begin at the same character, the
    longest.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        """`stops`: at least one, none empty; `include`: the text that is passed on includes the stop string."""
        self.found: str | None = None
        """The stop string that was found; None until then."""
        self._stops = stops
        self._include = include
        self._pattern = re.compile("|".join(re.escape(stop) for stop in sorted(stops, key=len, reverse=True)))
        self._longest = max(map(len, stops))
        self._held = ""

    def feed(self, piece: str) -> str:
        """Return the text that `piece` makes certain. After `found` is set, give no further pieces."""
        text = self._held + piece
        match = self._pattern.search(text)
        if match is not None:
            self.found = match.group()
            self._held = ""
            return text[: match.end() if self._include else match.start()]
        certain = len(text) - self._length_of_beginning(text)
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """Return the text that is still held back, when no more text will arrive."""
        held, self._held = self._held, ""
        return held

    def _length_of_beginning(self, text: str) -> int:
        """Return the largest number of characters at the end of `text` that begin a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-size:]
            if any(stop.startswith(end) for stop in self._stops):
                return size
        return 0
