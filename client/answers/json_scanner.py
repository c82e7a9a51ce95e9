"""An incremental scanner that finds the end of one JSON value in a text that arrives in parts."""

import enum
import re
from typing import Final

MAX_DEPTH: Final = 64
"""Largest number of arrays and objects inside each other. A value that is nested deeper is invalid."""

_WHITESPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
"""Characters of a string that stand for themselves."""
_DIGITS = re.compile(r"[0-9]*")
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
_WORDS = {"t": "rue", "f": "alse", "n": "ull"}
"""What follows the first letter of each word."""


class _State(enum.Enum):
    """What the scanner expects next."""

    VALUE = enum.auto()
    FIRST_ITEM = enum.auto()  # a value, or the end of the array
    FIRST_KEY = enum.auto()  # a key, or the end of the object
    KEY = enum.auto()
    COLON = enum.auto()
    AFTER_VALUE = enum.auto()  # a comma, or the end of the array or object
    STRING = enum.auto()
    ESCAPE = enum.auto()
    HEX = enum.auto()
    WORD = enum.auto()
    # States within a number, named by what was read last.
    MINUS = enum.auto()
    ZERO = enum.auto()
    INTEGER = enum.auto()
    POINT = enum.auto()
    FRACTION = enum.auto()
    EXPONENT = enum.auto()
    EXPONENT_SIGN = enum.auto()
    EXPONENT_DIGITS = enum.auto()


_BLANK_STATES = frozenset(
    (_State.VALUE, _State.FIRST_ITEM, _State.FIRST_KEY, _State.KEY, _State.COLON, _State.AFTER_VALUE)
)
"""States in which whitespace may follow."""
_DIGIT_STATES = {
    _State.MINUS: _State.INTEGER,
    _State.INTEGER: _State.INTEGER,
    _State.POINT: _State.FRACTION,
    _State.FRACTION: _State.FRACTION,
    _State.EXPONENT: _State.EXPONENT_DIGITS,
    _State.EXPONENT_SIGN: _State.EXPONENT_DIGITS,
    _State.EXPONENT_DIGITS: _State.EXPONENT_DIGITS,
}
"""States in which a digit may follow, and the state after it."""
_WHOLE_NUMBERS = frozenset((_State.ZERO, _State.INTEGER, _State.FRACTION, _State.EXPONENT_DIGITS))
"""States in which a number may end."""


class JsonScanner:
    """Scans one JSON value (RFC 8259), part by part, and reads each character once.

    A number ends at the first character after it; the other values end with their last character.
    """

    def __init__(self) -> None:
        self.complete = False
        """The value has ended."""
        self.failed = False
        """The next character cannot belong to a JSON value, or the value is nested too deeply."""
        self._state = _State.VALUE
        self._open: list[str] = []
        """The closing bracket of each array and object that is open."""
        self._in_key = False
        """The string that is being read is a key."""
        self._rest = ""
        """The letters of a word that are still to come."""
        self._hex_digits = 0
        """Number of hexadecimal digits of an escape that are still to come."""

    def scan(self, text: str, start: int = 0) -> int:
        """Read the part `text[start:]`. Return the end of its characters that belong to the value.

        The end is less than the length of the text only if the value is then complete, or the scan failed.
        """
        position = start
        while position < len(text) and not (self.complete or self.failed):
            state = self._state
            if state is _State.STRING:
                position = self._string(text, position)
            elif state in _BLANK_STATES:
                position = self._structure(text, position)
            elif state is _State.ESCAPE or state is _State.HEX:
                position = self._escape(text, position)
            elif state is _State.WORD:
                position = self._word(text, position)
            else:
                position = self._number(text, position)
        return position

    def pass_control_character(self) -> bool:
        """Let the scan go on after a control character in a string, such as a line break. Return False otherwise."""
        # Every other character may be in a string.
        if not self.failed or self._state is not _State.STRING:
            return False
        self.failed = False
        return True

    def _structure(self, text: str, position: int) -> int:
        blank = _WHITESPACE.match(text, position)
        assert blank is not None  # it matches the empty text
        position = blank.end()
        if position == len(text):
            return position
        character, state = text[position], self._state
        if state is _State.COLON:
            self._expect(character == ":", _State.VALUE)
        elif state is _State.AFTER_VALUE:
            if character == ",":
                self._state = _State.KEY if self._open[-1] == "}" else _State.VALUE
            else:
                self._close(character)
        elif state is _State.KEY or state is _State.FIRST_KEY:
            if character == '"':
                self._in_key, self._state = True, _State.STRING
            else:
                self._expect(state is _State.FIRST_KEY and character == "}", state)
                if not self.failed:
                    self._close(character)
        elif state is _State.FIRST_ITEM and character == "]":
            self._close(character)
        else:
            self._begin(character)
        return position if self.failed else position + 1

    def _begin(self, character: str) -> None:
        """Begin the value whose first character is given."""
        if character == '"':
            self._in_key, self._state = False, _State.STRING
        elif character in "{[":
            if len(self._open) == MAX_DEPTH:
                self.failed = True
                return
            self._open.append("}" if character == "{" else "]")
            self._state = _State.FIRST_KEY if character == "{" else _State.FIRST_ITEM
        elif character in _WORDS:
            self._rest, self._state = _WORDS[character], _State.WORD
        elif character == "-":
            self._state = _State.MINUS
        elif character == "0":
            self._state = _State.ZERO
        else:
            self._expect("1" <= character <= "9", _State.INTEGER)

    def _close(self, character: str) -> None:
        if self._open[-1] != character:
            self.failed = True
            return
        self._open.pop()
        self._end_value()

    def _end_value(self) -> None:
        self._state = _State.AFTER_VALUE
        self.complete = not self._open

    def _expect(self, expected: bool, state: _State) -> None:
        if expected:
            self._state = state
        else:
            self.failed = True

    def _string(self, text: str, position: int) -> int:
        plain = _PLAIN.match(text, position)
        assert plain is not None  # it matches the empty text
        position = plain.end()
        if position == len(text):
            return position
        if text[position] == '"':
            if self._in_key:
                self._state = _State.COLON
            else:
                self._end_value()
        else:
            self._expect(text[position] == "\\", _State.ESCAPE)
        return position if self.failed else position + 1

    def _escape(self, text: str, position: int) -> int:
        character = text[position]
        if self._state is _State.HEX:
            self._hex_digits -= 1
            self._expect(character in _HEX_DIGITS, _State.HEX if self._hex_digits else _State.STRING)
        elif character == "u":
            self._hex_digits, self._state = 4, _State.HEX
        else:
            self._expect(character in '"\\/bfnrt', _State.STRING)
        return position if self.failed else position + 1

    def _word(self, text: str, position: int) -> int:
        if text[position] != self._rest[0]:
            self.failed = True
            return position
        self._rest = self._rest[1:]
        if not self._rest:
            self._end_value()
        return position + 1

    def _number(self, text: str, position: int) -> int:
        state, character = self._state, text[position]
        if state in _DIGIT_STATES and "0" <= character <= "9":
            if state is _State.MINUS and character == "0":
                self._state = _State.ZERO
                return position + 1
            self._state = _DIGIT_STATES[state]
            digits = _DIGITS.match(text, position)
            assert digits is not None  # it matches the empty text
            return digits.end()
        if character == "." and state in (_State.ZERO, _State.INTEGER):
            self._state = _State.POINT
        elif character in "eE" and state in (_State.ZERO, _State.INTEGER, _State.FRACTION):
            self._state = _State.EXPONENT
        elif character in "+-" and state is _State.EXPONENT:
            self._state = _State.EXPONENT_SIGN
        else:
            if state in _WHOLE_NUMBERS:
                self._end_value()
            else:
                self.failed = True
            return position
        return position + 1


def is_json(text: str) -> bool:
    """Return whether `text` is one JSON value, without whitespace after it."""
    scanner = JsonScanner()
    # A number ends at the character after it.
    end = scanner.scan(text + " ")
    return scanner.complete and end == len(text)
