"""Calls that are written as a JSON object with a name and arguments."""

import json
from collections.abc import Collection, Sequence

from vllm_mp.client.answers.json_scanner import is_json
from vllm_mp.client.answers.reader import AnswerReader, Reading
from vllm_mp.client.answers.surrogates import without_half_surrogates
from vllm_mp.client.tool_parsers.tool_parser import ConstrainedCall, Tool

_NAME = '"name"'
_ARGUMENTS = ('"arguments"', '"parameters"')
_FURTHER = ('"id"', '"type"')
"""Further keys that models often write, with strings."""
_KNOWN_KEYS = (_NAME, *_ARGUMENTS, *_FURTHER)


def constrained_json_calls(
    tools: Sequence[Tool], arguments: str, *, begin: str = "", end: str = ""
) -> tuple[ConstrainedCall, ...]:
    """Return calls of `tools` between the texts `begin` and `end`; `arguments` is the key of the arguments."""
    return tuple(
        ConstrainedCall(
            tool.name, f'{begin}{{"name": {json.dumps(tool.name)}, "{arguments}": ', tool.parameters, "}" + end
        )
        for tool in tools
    )


def read_json_calls(answer: AnswerReader, names: Collection[str], *, any_keys: bool = False) -> Reading[bool]:
    """Read a call, or a JSON list of calls, as `read_json_call` does; return whether there is a call."""
    is_list = yield from answer.literal("[")
    yield from answer.whitespace()
    found = False
    while (yield from read_json_call(answer, names, any_keys=any_keys)):
        found = True
        if not is_list:
            break
        yield from answer.whitespace()
        if (yield from answer.literal(",")):
            yield from answer.whitespace()
        elif (yield from answer.literal("]")):
            answer.drop()
            break
    return found


def read_json_call(answer: AnswerReader, names: Collection[str], *, any_keys: bool = False) -> Reading[bool]:
    """Read a call such as {"name": "f", "arguments": {}} of one of the tools `names`; return whether it is a call.

    The keys may stand in any order. The arguments may be a JSON object, a JSON string that holds one, or missing. If
    they come after the name, they become pieces as they arrive. The text of a call is dropped, up to the end of its
    object. Of other text, all up to the first difference is held.

    With `any_keys` the object may have further keys of any name, with any values; otherwise only an id and a type, so
    that less of an object that is not a call is held. An object with other keys and without arguments is no call: its
    arguments may be there.
    """
    name: str | None = None
    arguments: str | None = None
    has_other_keys = False
    if not (yield from answer.literal("{")):
        return False
    while name is None or arguments is None:
        key = yield from _key(answer, any_key=any_keys)
        if key in _ARGUMENTS and name is not None and (yield from answer.peek()) == "{":
            if (yield from stream_arguments(answer, name)):
                yield from _rest_of_object(answer)
            return True
        if key == _NAME and name is None:
            name = yield from _name(answer, names)
            valid = name is not None
        elif key in _ARGUMENTS and arguments is None:
            arguments = yield from _whole_arguments(answer)
            valid = arguments is not None
        else:
            is_further = key not in (None, _NAME, *_ARGUMENTS) and (any_keys or (yield from answer.peek()) == '"')
            valid = is_further and bool((yield from answer.json_text()))
            has_other_keys = has_other_keys or key not in _FURTHER
        if not valid:
            return False
        yield from answer.whitespace()
        if name is not None and arguments is None and not has_other_keys and (yield from answer.literal("}")):
            _add_call(answer, name, "{}")
            return True
        if (name is None or arguments is None) and not (yield from answer.literal(",")):
            return False
    _add_call(answer, name, arguments)
    yield from _rest_of_object(answer)
    return True


def stream_arguments(answer: AnswerReader, name: str) -> Reading[bool]:
    """Begin a call, whose arguments become pieces as they arrive, and end it. Return whether it is complete."""
    answer.start_call(name)
    complete = yield from answer.json(answer.arguments, is_lenient=True)
    answer.end_call(complete=complete)
    return complete


def _add_call(answer: AnswerReader, name: str, arguments: str) -> None:
    answer.start_call(name)
    answer.arguments(arguments)
    answer.end_call()


def _key(answer: AnswerReader, *, any_key: bool) -> Reading[str | None]:
    """Hold a key of a call, its colon and the whitespace around them; return the key, or None for any other text."""
    yield from answer.whitespace()
    key = yield from answer.one_of(_KNOWN_KEYS)
    if key is None and any_key and (yield from answer.peek()) == '"':
        key = yield from answer.json_text()
    if key is not None and (yield from _colon(answer)):
        return key
    return None


def _colon(answer: AnswerReader) -> Reading[bool]:
    yield from answer.whitespace()
    if not (yield from answer.literal(":")):
        return False
    yield from answer.whitespace()
    return True


def _name(answer: AnswerReader, names: Collection[str]) -> Reading[str | None]:
    """Hold a JSON string; return it if it is one of `names`."""
    quoted = {json.dumps(name): name for name in names}
    found = yield from answer.one_of(tuple(quoted))
    return None if found is None else quoted[found]


def _whole_arguments(answer: AnswerReader) -> Reading[str | None]:
    """Hold the JSON value that comes next; return the JSON object that it is or holds as a string."""
    text = yield from answer.json_text()
    if text is not None and text.startswith('"'):
        text = str(json.loads(without_half_surrogates(text))).strip()
        if not is_json(text):
            return None
    if text == "null":
        return "{}"
    return text if text is not None and text.startswith("{") else None


def _rest_of_object(answer: AnswerReader) -> Reading[None]:
    """Drop what follows the arguments, up to the end of the object. Hold it if it is malformed."""
    yield from answer.whitespace()
    while (yield from answer.literal(",")):
        yield from answer.whitespace()
        is_key = (yield from answer.peek()) == '"' and bool((yield from answer.json_text()))
        if not is_key or not (yield from _colon(answer)) or not (yield from answer.json_text()):
            break
        yield from answer.whitespace()
    if (yield from answer.literal("}")) or (yield from answer.peek()) == "":
        answer.drop()
