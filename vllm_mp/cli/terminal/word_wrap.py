"""Line breaks between the words of a text that arrives in pieces."""

from prompt_toolkit.utils import get_cwidth

_MARGIN = 20
"""Columns at the end of a line. A word that begins there is held back until it is complete."""


class WordWrap:
    """Keeps the column of the cursor, and the word whose line is not known yet.

    A word that begins before the margin is written as it arrives; the terminal breaks it if it is longer than the
    margin.
    """

    def __init__(self) -> None:
        self._column = 0
        self._held = ""
        self._begins_word = True
        """The next character begins a word."""

    def wrapped(self, text: str, columns: int) -> str:
        """Return what to write for `text` on a terminal of `columns`: line breaks added, the last word held back."""
        return "".join(self._character(character, columns) for character in text)

    def released(self, columns: int) -> str:
        """Return the word held back, after a line break if the line has no room for it."""
        held, self._held = self._held, ""
        self._begins_word = True
        return self._break_before(held, columns) + self._put(held, columns)

    def released_before(self, text: str, columns: int) -> str:
        """Return the word held back and the space or line break before `text`, which is written next on one line."""
        before = self.released(columns)
        if self._column:
            before += self._break_before(" " + text, columns) or self._put(" ", columns)
        self._put(text, columns)
        return before

    def _character(self, character: str, columns: int) -> str:
        margin = min(_MARGIN, columns // 2)
        if character == "\n":
            before = self.released(columns)
            self._column = 0
            return before + character
        if character.isspace():
            before = self.released(columns)
            return before + (self._break_before(character, columns) or self._put(character, columns))
        if get_cwidth(character) > 1:  # each Chinese character is a word
            return self.released(columns) + self._put(character, columns)
        if self._held or (self._begins_word and self._column > columns - margin):
            self._held += character
            if get_cwidth(self._held) < margin:
                return ""
            character = self.released(columns)
            self._begins_word = False
            return character
        self._begins_word = False
        return self._put(character, columns)

    def _break_before(self, text: str, columns: int) -> str:
        """Return a line break if the line has no room for `text`, otherwise ""."""
        if self._column == 0 or self._column + self._width(text) <= columns:
            return ""
        self._column = 0
        return "\n"

    def _put(self, text: str, columns: int) -> str:
        self._column += self._width(text)
        if self._column > columns:
            self._column = self._width(text)  # the terminal breaks the line
        return text

    def _width(self, text: str) -> int:
        return 8 - self._column % 8 if text == "\t" else get_cwidth(text)
