"""Python values in the arguments of a call, turned into JSON as they arrive."""

import json
import math
import re
from collections.abc import Callable
from json.encoder import encode_basestring

from vllm_mp.client.answers.json_scanner import MAX_DEPTH, is_json
from vllm_mp.client.answers.reader import AnswerReader, Reading

_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_AFTER_WORD = (",", ")", "]", "}", ":", " ", "\n", "\t", "\r")
_ENDS = {"[": ("]", "]"), "(": (")", "]"), "{": ("}", "}")}
"""For each opening bracket the closing bracket in Python and in JSON."""
_QUOTES = ("'", '"')
_STRING_PREFIXES = ("r", "R", "u", "U")
_NUMBER = re.compile(r"[-+.0-9A-Za-z_]*")
_MAX_NUMBER_LENGTH = 4096
_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "a": "\a",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "\n": "",
}
"""The text for each character after a backslash."""
_HEX_LENGTHS = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile(r"[0-9a-fA-F]*")
_OCTAL = re.compile(r"[0-7]*")
_ANY = re.compile(r".*", re.DOTALL)

_Emit = Callable[[str], None]
"""Takes a part of the JSON text."""


def json_text_of(text: str) -> str:
    """Return `text` as it stands between the quotes of a JSON string."""
    return encode_basestring(text)[1:-1]


def read_python_value(answer: AnswerReader) -> Reading[bool]:
    """Turn a string, number, constant, list, tuple or dict into JSON arguments; return whether it is one.

    Keys of a dict that are numbers or constants become strings, as in `json.dumps`.
    """
    return (yield from _value(answer, answer.arguments, 0))


def python_to_json(text: str) -> str | None:
    """Return the JSON of a value in Python, as `read_python_value` reads it; None if `text` is no such value."""
    answer = AnswerReader()
    answer.add(text)
    answer.ended = True
    parts: list[str] = []
    try:
        next(_value(answer, parts.append, 0))
    except StopIteration as end:
        return "".join(parts) if end.value and not answer.unread else None
    raise AssertionError("an answer that has ended has no more text to wait for")


def _value(answer: AnswerReader, emit: _Emit, depth: int) -> Reading[bool]:
    """Turn a value into JSON; return whether it is one. `depth` is the number of brackets around it."""
    opening = yield from _opening(answer)
    if opening:
        return (yield from _string(answer, emit, opening))
    bracket = yield from answer.peek()
    if bracket in _ENDS:
        if depth == MAX_DEPTH:
            return False
        yield from answer.literal(bracket)
        answer.drop()
        if bracket == "(":
            return (yield from _parentheses(answer, emit, depth + 1))
        emit(bracket)
        return (yield from _items(answer, emit, bracket, "", depth + 1))
    plain = yield from _plain(answer)
    if plain is None:
        return False
    answer.drop()
    emit(plain)
    return True


def _plain(answer: AnswerReader) -> Reading[str | None]:
    """Hold a number or a constant. Return it as JSON; None if there is neither."""
    character = yield from answer.peek()
    if character and character in "+-.0123456789":
        return _json_number((yield from answer.run(_NUMBER, _MAX_NUMBER_LENGTH)))
    word = yield from answer.one_of(tuple(_WORDS), before=_AFTER_WORD)
    return None if word is None else _WORDS[word]


def _parentheses(answer: AnswerReader, emit: _Emit, depth: int) -> Reading[bool]:
    """Turn what follows a parenthesis into a list if it is a tuple, else into the value in the parentheses."""
    yield from answer.whitespace()
    if (yield from answer.literal(")")):
        answer.drop()
        emit("[]")
        return True
    first: list[str] = []
    is_value = yield from _value(answer, first.append, depth)
    yield from answer.whitespace()
    if is_value and (yield from answer.literal(")")):
        answer.drop()
        emit("".join(first))
        return True
    emit("[" + "".join(first))
    if not is_value or not (yield from answer.literal(",")):
        return False
    return (yield from _items(answer, emit, "(", ", ", depth))


def _items(answer: AnswerReader, emit: _Emit, bracket: str, separator: str, depth: int) -> Reading[bool]:
    """Turn the items up to the end of `bracket` into JSON, with `separator` before the first of them."""
    end, json_end = _ENDS[bracket]
    while True:
        yield from answer.whitespace()
        if (yield from answer.literal(end)):
            answer.drop()
            emit(json_end)
            return True
        emit(separator)
        if bracket == "{" and not (yield from _key(answer, emit)):
            return False
        if not (yield from _value(answer, emit, depth)):
            return False
        yield from answer.whitespace()
        separator = ", "
        if not (yield from answer.literal(",")) and (yield from answer.peek()) != end:
            return False


def _key(answer: AnswerReader, emit: _Emit) -> Reading[bool]:
    """Turn the key of a dict and its colon into JSON."""
    opening = yield from _opening(answer)
    if opening:
        if not (yield from _string(answer, emit, opening)):
            return False
    else:
        plain = yield from _plain(answer)
        if plain is None:
            return False
        answer.drop()
        emit(f'"{plain}"')
    yield from answer.whitespace()
    if not (yield from answer.literal(":")):
        return False
    answer.drop()
    emit(": ")
    yield from answer.whitespace()
    return True


def _opening(answer: AnswerReader) -> Reading[str]:
    """Hold and return the quotes that begin a string, with their prefix; "" if no string comes next."""
    prefix = (yield from answer.one_of(_STRING_PREFIXES, before=_QUOTES)) or ""
    quote = yield from answer.peek()
    if quote not in _QUOTES:
        return ""
    yield from answer.literal(quote)
    return prefix + (quote * 3 if (yield from answer.literal(quote * 2)) else quote)


def _string(answer: AnswerReader, emit: _Emit, opening: str) -> Reading[bool]:
    """Turn the string after `opening`, and the strings that follow and that Python joins with it, into JSON."""
    emit('"')
    while opening:
        answer.drop()
        is_raw = opening[0] in "rR"
        quotes = opening.lstrip("".join(_STRING_PREFIXES))
        while True:
            found = yield from answer.until((quotes, "\\"), lambda text: emit(json_text_of(text)))
            if found is None:
                return False
            yield from answer.literal(found)
            if found == quotes:
                break
            text = yield from _raw_escape(answer) if is_raw else _escape(answer)
            if text is None:
                return False
            answer.drop()
            emit(text)
        answer.drop()
        yield from answer.whitespace()
        opening = yield from _opening(answer)
    emit('"')
    return True


def _raw_escape(answer: AnswerReader) -> Reading[str | None]:
    """Hold what follows a backslash in a raw string. Return both as text of a JSON string; None at the end."""
    character = yield from answer.run(_ANY, 1)
    return json_text_of("\\" + character) if character else None


def _escape(answer: AnswerReader) -> Reading[str | None]:
    """Hold what follows a backslash. Return it as text of a JSON string; None if it is malformed."""
    character = yield from answer.peek()
    if character in _HEX_LENGTHS:
        yield from answer.literal(character)
        length = _HEX_LENGTHS[character]
        digits = yield from answer.run(_HEX, length)
        if len(digits) < length or int(digits, 16) > 0x10FFFF:
            return None
        code = int(digits, 16)
        # Half of a surrogate pair stays an escape, so that it can be encoded and JSON joins the halves.
        return json.dumps(chr(code), ensure_ascii=0xD800 <= code <= 0xDFFF)[1:-1]
    if character and character in "01234567":
        return json_text_of(chr(int((yield from answer.run(_OCTAL, 3)), 8)))
    character = yield from answer.run(_ANY, 1)
    return json_text_of(_ESCAPES.get(character, "\\" + character)) if character else None


def _json_number(text: str) -> str | None:
    """Return a number of Python as JSON; None if it has no such form."""
    if is_json(text):
        return text
    try:
        return str(int(text, 0))
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        return None
    return repr(number) if math.isfinite(number) else None
