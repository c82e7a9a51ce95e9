"""The text of an answer as it arrives, read by a generator that makes pieces of it."""

import functools
import re
import sys
from collections.abc import Callable, Generator, Sequence
from json.encoder import encode_basestring
from typing import TypeVar

from vllm_mp.client.answers.json_scanner import JsonScanner
from vllm_mp.client.answers.pieces import CallArguments, CallEnd, CallStart, ContentPiece, Piece, ReasoningPiece

_T = TypeVar("_T")
Reading = Generator[None, None, _T]
"""A part of a parser. It yields when it needs more text, and returns what it read."""

_WHITESPACE = re.compile(r"\s*")


class AnswerReader:
    """The text of one answer, and the pieces made of it so far.

    The methods that return a `Reading` are called with `yield from`. They read on from the current position:

    - `until` and `find` turn the text up to a marker into pieces;
    - the others, like `literal`, hold what they read until the parser knows what it is. Then the parser calls `drop` if
      it is the markup of a call, or `release` if it is content. A method that returns False or None has read up to the
      first character that differs.

    So each character becomes part of one piece or is dropped once, and is read once.

    Whitespace belongs to the calls if there is nothing else between a call and the beginning of the answer, another
    call, or the end. Other content is kept to the character.
    """

    def __init__(self) -> None:
        self.ended = False
        """No more text will come."""
        self._text = ""
        self._position = 0
        self._held: list[str] = []
        self._pieces: list[Piece] = []
        self._texts: list[str] = []
        """The texts of the last piece, which is not in `_pieces` yet."""
        self._kind: type[ContentPiece | ReasoningPiece | CallArguments] = ContentPiece
        """The kind of the last piece."""
        self._blank: list[str] | None = []
        """Whitespace at the beginning or after a call that may belong to a call; None after other content."""
        self._num_calls = 0
        self._call_open = False

    @property
    def unread(self) -> str:
        """The text that has arrived and is not read yet."""
        return self._text[self._position :]

    # Called by the parser's owner.

    def add(self, text: str) -> None:
        """Add text that has arrived. Only what is not read yet is copied."""
        self._text = self.unread + text
        self._position = 0

    def take_pieces(self) -> list[Piece]:
        """Return the pieces made since the last call."""
        self._flush()
        pieces, self._pieces = self._pieces, []
        return pieces

    def release_rest(self) -> None:
        """Turn all text so far that is in no piece into content: the parser reads no further."""
        self.release()
        self.content(self.unread)
        self._position = len(self._text)

    def release_all(self) -> None:
        """Turn the rest of an answer that has ended into content, and end a call that is open."""
        if self._call_open:
            self.end_call(complete=False)
        self.release_rest()
        blank, self._blank = self._blank, None
        if not self._num_calls:
            self.content("".join(blank or ()))

    # Reading.

    def peek(self) -> Reading[str]:
        """Return the next character, which stays unread; "" at the end of the answer."""
        while self._position == len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self._position]

    def whitespace(self) -> Reading[None]:
        """Hold the whitespace that comes next."""
        yield from self.run(_WHITESPACE)

    def run(self, pattern: re.Pattern[str], max_length: int = sys.maxsize) -> Reading[str]:
        """Hold and return the characters that come next and match `pattern`, which repeats one set of characters.

        Stops after `max_length` characters.
        """
        parts: list[str] = []
        while True:
            found = pattern.match(self._text, self._position, min(self._position + max_length, len(self._text)))
            length = found.end() - self._position if found else 0
            parts.append(self._text[self._position : self._position + length])
            self._hold(length)
            max_length -= length
            if self._position < len(self._text) or self.ended or not max_length:
                return "".join(parts)
            yield

    def literal(self, literal: str, *, may_be_cut_off: bool = False) -> Reading[bool]:
        """Hold `literal` if it comes next. Return whether it does.

        With `may_be_cut_off` its beginning suffices if the answer ends there.
        """
        if (yield from self.one_of((literal,))) is not None:
            return True
        rest = len(self._text) - self._position
        if may_be_cut_off and self.ended and self._text.endswith(literal[:rest]) and rest < len(literal):
            self._hold(rest)
            return True
        return False

    def one_of(self, literals: Sequence[str], before: Sequence[str] = ("",)) -> Reading[str | None]:
        """Hold and return which of `literals` comes next, if one of the texts `before` which it must stand follows it.

        The texts `before` stay unread. No literal with a text after it may begin another one.
        """
        while True:
            waiting = False
            rest = len(self._text) - self._position
            for literal in literals:
                for follower in before:
                    whole = literal + follower
                    if self._text.startswith(whole, self._position):
                        self._hold(len(literal))
                        return literal
                    waiting = waiting or (rest < len(whole) and whole.startswith(self._text[self._position :]))
            if self.ended or not waiting:
                return None
            yield

    def find(self, *markers: str) -> Reading[str | None]:
        """Turn the text before the next of `markers` into content; return the marker, which stays unread.

        Returns None at the end of the answer. Text is kept back only while it may begin a marker.
        """
        return (yield from self.until(markers, self.content))

    def find_line(self, beginning: str, marker: str) -> Reading[bool]:
        """Turn the text before the next line that has this beginning, or before `marker`, into content.

        Returns False at the end of the answer.
        """
        found = yield from self.find("\n" + beginning, marker)
        if found is not None and found != marker:
            self.content("\n")
            self._position += 1
        return found is not None

    def until(self, markers: Sequence[str], emit: Callable[[str], None]) -> Reading[str | None]:
        """Pass the text before the next of `markers` to `emit`; return the marker, which stays unread.

        Returns None at the end of the answer. A marker may contain another one at its end only.
        """
        whole, begun, max_begun = _patterns(tuple(markers))
        while True:
            found = whole.search(self._text, self._position)
            if found is None and not self.ended:
                found = begun.search(self._text, max(self._position, len(self._text) - max_begun))
            end = found.start() if found else len(self._text)
            if end > self._position:
                emit(self._text[self._position : end])
                self._position = end
            if found and found.group() in markers:
                return found.group()
            if self.ended:
                return None
            yield

    def json(self, emit: Callable[[str], None], *, is_lenient: bool = False) -> Reading[bool]:
        """Pass the text of the JSON value that comes next to `emit`. Return whether the value is whole and valid.

        With `is_lenient` control characters in strings, such as line breaks, become escapes.
        """
        scanner = JsonScanner()
        while True:
            end = scanner.scan(self._text, self._position)
            if end > self._position:
                emit(self._text[self._position : end])
                self._position = end
            if is_lenient and scanner.pass_control_character():
                emit(encode_basestring(self._text[self._position])[1:-1])
                self._position += 1
                continue
            if scanner.complete or scanner.failed or self.ended:
                return scanner.complete
            yield

    def json_text(self) -> Reading[str | None]:
        """Hold the JSON value that comes next. Return its text; None if it is not whole and valid."""
        parts: list[str] = []

        def hold(text: str) -> None:
            parts.append(text)
            self._held.append(text)

        return "".join(parts) if (yield from self.json(hold)) else None

    # What becomes of the text.

    def drop(self) -> None:
        """Forget the text that is held: it is markup."""
        self._held.clear()

    def drop_rest(self) -> None:
        """Forget all text that is in no piece: it is markup that the end of the answer cuts off."""
        self._held.clear()
        self._position = len(self._text)

    def release(self) -> None:
        """Turn the text that is held into content."""
        self.content(self.take_held())

    def take_held(self) -> str:
        """Return the text that is held, and hold it no longer."""
        held = "".join(self._held)
        self._held.clear()
        return held

    def content(self, text: str) -> None:
        """Add content."""
        if self._blank is not None:
            if not text or text.isspace():
                self._blank.append(text)
                return
            text = "".join(self._blank) + text
            self._blank = None
        self._add(ContentPiece, text)

    def reasoning(self, text: str) -> None:
        """Add reasoning."""
        self._add(ReasoningPiece, text)

    def start_call(self, name: str) -> None:
        """Begin a call of the tool `name`. The text that is held is its markup, and dropped."""
        self.drop()
        self._flush()
        self._blank = []
        self._pieces.append(CallStart(self._num_calls, name))
        self._num_calls += 1
        self._call_open = True

    def arguments(self, text: str) -> None:
        """Add a part of the JSON text of the arguments."""
        self._add(CallArguments, text)

    def end_call(self, *, complete: bool = True) -> None:
        """End the call that was begun last. With `complete=False` its arguments are malformed or cut off."""
        self._flush()
        self._pieces.append(CallEnd(self._num_calls - 1, complete))
        self._call_open = False

    def _add(self, kind: type[ContentPiece | ReasoningPiece | CallArguments], text: str) -> None:
        if not text:
            return
        if kind is not self._kind:
            self._flush()
            self._kind = kind
        self._texts.append(text)

    def _flush(self) -> None:
        """Make a piece of the texts that are not in a piece yet."""
        if not self._texts:
            return
        text = "".join(self._texts)
        self._texts.clear()
        if issubclass(self._kind, CallArguments):
            self._pieces.append(CallArguments(self._num_calls - 1, text))
        else:
            self._pieces.append(self._kind(text))

    def _hold(self, length: int) -> None:
        if length:
            self._held.append(self._text[self._position : self._position + length])
            self._position += length


@functools.lru_cache
def _patterns(markers: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str], int]:
    """Return the pattern of a marker, that of a marker's beginning at the end of a text, and its maximal length."""
    beginnings = {marker[:length] for marker in markers for length in range(1, len(marker))}
    begun = "|".join(map(re.escape, sorted(beginnings, key=len, reverse=True)))
    whole = "|".join(map(re.escape, markers))
    return re.compile(whole), re.compile(rf"(?:{begun or '(?!)'})\Z"), max(map(len, markers)) - 1
