"""Finding stop strings in a text that arrives in pieces."""

import re
from collections.abc import Sequence


class StopStrings:
    """Passes text on up to the first stop string, and nothing that may turn out to be the beginning of one.

    Of several in the text the one that begins first counts, and of those the longest.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        """`include`: the stop string belongs to the text that is passed on."""
        self.found: str | None = None
        self._stops = stops
        self._include = include
        self._pattern = re.compile("|".join(re.escape(stop) for stop in sorted(stops, key=len, reverse=True)))
        self._longest = max(map(len, stops))
        self._held = ""

    def feed(self, piece: str) -> str:
        """The text that `piece` makes certain; once `found` is set, that is the last of it."""
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
        """What is still held back when no more text will come."""
        held, self._held = self._held, ""
        return held

    def _length_of_beginning(self, text: str) -> int:
        """How much of the end of `text` is the beginning of a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-size:]
            if any(stop.startswith(end) for stop in self._stops):
                return size
        return 0
