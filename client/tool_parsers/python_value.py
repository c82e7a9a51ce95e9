"""Python values in the arguments of a call, turned into JSON as they arrive."""

import json
import math
import re
from json.encoder import encode_basestring

from vllm_mp.client.answers.json_scanner import MAX_DEPTH, is_json
from vllm_mp.client.answers.reader import AnswerReader, Reading

_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_AFTER_WORD = (",", ")", "]", "}", " ", "\n", "\t", "\r")
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


def json_text_of(text: str) -> str:
    """Return `text` as it stands between the quotes of a JSON string."""
    return encode_basestring(text)[1:-1]


def read_python_value(answer: AnswerReader, depth: int = 0) -> Reading[bool]:
    """Turn a string, number, constant, list or dict with string keys into JSON arguments; return whether it is one.

    `depth` is the number of lists and dicts around it.
    """
    character = yield from answer.peek()
    if character in ("'", '"'):
        return (yield from _string(answer))
    if character in ("[", "{"):
        return depth < MAX_DEPTH and (yield from _items(answer, depth + 1))
    if character and character in "+-.0123456789":
        number = _json_number((yield from answer.run(_NUMBER, _MAX_NUMBER_LENGTH)))
        if number is not None:
            _write(answer, number)
        return number is not None
    word = yield from answer.one_of(tuple(_WORDS), before=_AFTER_WORD)
    if word is not None:
        _write(answer, _WORDS[word])
    return word is not None


def _write(answer: AnswerReader, text: str) -> None:
    """Add JSON text for the Python text that is held."""
    answer.drop()
    answer.arguments(text)


def _items(answer: AnswerReader, depth: int) -> Reading[bool]:
    is_list = yield from answer.literal("[")
    if not is_list:
        yield from answer.literal("{")
    end = "]" if is_list else "}"
    _write(answer, "[" if is_list else "{")
    separator = ""
    while True:
        yield from answer.whitespace()
        if (yield from answer.literal(end)):
            _write(answer, end)
            return True
        answer.arguments(separator)
        if not is_list and not (yield from _key(answer)):
            return False
        if not (yield from read_python_value(answer, depth)):
            return False
        yield from answer.whitespace()
        separator = ", "
        if not (yield from answer.literal(",")) and (yield from answer.peek()) != end:
            return False


def _key(answer: AnswerReader) -> Reading[bool]:
    """Turn the key of a dict and its colon into JSON."""
    if (yield from answer.peek()) not in ("'", '"') or not (yield from _string(answer)):
        return False
    yield from answer.whitespace()
    if not (yield from answer.literal(":")):
        return False
    _write(answer, ": ")
    yield from answer.whitespace()
    return True


def _string(answer: AnswerReader) -> Reading[bool]:
    quote = yield from answer.run(_ANY, 1)
    if (yield from answer.literal(quote * 2)):
        quote *= 3
    _write(answer, '"')
    while True:
        found = yield from answer.until((quote, "\\"), lambda text: answer.arguments(json_text_of(text)))
        if found is None:
            return False
        yield from answer.literal(found)
        if found == quote:
            _write(answer, '"')
            return True
        text = yield from _escape(answer)
        if text is None:
            return False
        _write(answer, text)


def _escape(answer: AnswerReader) -> Reading[str | None]:
    """Hold what follows a backslash. Return it as text of a JSON string; None if it is malformed."""
    character = yield from answer.peek()
    if character in _HEX_LENGTHS:
        yield from answer.literal(character)
        length = _HEX_LENGTHS[character]
        digits = yield from answer.run(_HEX, length)
        if len(digits) < length or int(digits, 16) > 0x10FFFF:
            return None
        # Half of a surrogate pair stays an escape, so that JSON joins the halves.
        return json.dumps(chr(int(digits, 16)), ensure_ascii=length == 4)[1:-1]
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
