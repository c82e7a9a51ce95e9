"""The search for stop strings in a text that arrives in pieces."""

from collections.abc import Sequence


class StopStrings:
    """Passes text on up to the first stop string, and holds back text that may be the beginning of one.

    If a piece completes several stop strings, the one that is complete first counts, as if the piece came character by
    character. Of several that end at the same character, the first in the list counts.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        """`stops`: at least one, none empty; `include`: the text that is passed on includes the stop string."""
        self.found: str | None = None
        """The stop string that was found; None until then."""
        self._stops = stops
        self._include = include
        self._longest = max(map(len, stops))
        self._held = ""

    def feed(self, piece: str) -> str:
        """Return the text that `piece` makes certain. After `found` is set, give no further pieces."""
        text = self._held + piece
        end = self._find(text)
        if self.found is None:
            return self._hold_back(text)
        self._held = ""
        return text[: end if self._include else end - len(self.found)]

    def skip(self, piece: str) -> str:
        """Return the text that `piece` makes certain. A stop string that ends in it does not count.

        One that begins in it counts if it ends in a later piece.
        """
        return self._hold_back(self._held + piece)

    def flush(self) -> str:
        """Return the text that is still held back, when no more text will arrive."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> int:
        """Set `found` to the stop string that counts, if there is one, and return where it ends in `text`.

        It ends behind the text that was held back.
        """
        num_held, first_end = len(self._held), len(text) + 1
        for stop in self._stops:
            start = text.find(stop, max(num_held - len(stop) + 1, 0))
            if start >= 0 and start + len(stop) < first_end:
                self.found, first_end = stop, start + len(stop)
        return first_end

    def _hold_back(self, text: str) -> str:
        """Return `text` without the end that may begin a stop string, which is held back."""
        certain = len(text) - self._length_of_beginning(text)
        self._held = text[certain:]
        return text[:certain]

    def _length_of_beginning(self, text: str) -> int:
        """Return the largest number of characters at the end of `text` that begin a stop string without ending it."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-size:]
            if any(len(stop) > size and stop.startswith(end) for stop in self._stops):
                return size
        return 0
