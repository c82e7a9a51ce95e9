"""The bytes of a body become a struct, with errors that name the field."""

import codecs
import difflib
import functools
import re
from collections.abc import Callable
from typing import TypeVar

import msgspec

from vllm_mp.server.http.body.declared_types import literals, mark, structs, tags, type_at
from vllm_mp.server.http.body.unknown_fields import RemovedField, remove_unknown_fields
from vllm_mp.server.http.errors import ApiError

Body = TypeVar("Body", bound=msgspec.Struct)

_AT_PATH = re.compile(r" - at (?:`key` in )?`(\$[\w.\[\]]{0,200})`\Z")
"""The path of a declared field, at the end of the decoder's message. The text before it may repeat the body."""
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING_FIELD = re.compile(r"Object missing required field `(.*)`")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""An escape that is not a character without its other half."""
_MAX_SEPARATORS = 2**19
"""Number of commas that a body may have. Texts have few of them; decoding many small values holds up the event loop."""
_MAX_QUOTED = 200
"""Number of characters of a body that an error may repeat."""


def decode_body(content: bytes, kind: type[Body], removed: list[RemovedField] | None = None) -> Body:
    """Return the JSON `content` as a `kind`. Raises ApiError, naming the field, if it is none or too much.

    Fields that `kind` does not have, or does not serve, are left out and added to `removed`; None: they are refused.
    """
    if content.count(b",") > _MAX_SEPARATORS:
        message = f"the body has too many values: the limit is {_MAX_SEPARATORS} commas; split it into several requests"
        raise ApiError(413, message, code="body_too_large")
    content = content.removeprefix(codecs.BOM_UTF8)
    try:
        decode: Callable[..., Body] = functools.partial(msgspec.json.decode, content, type=kind)
        if removed is None:
            return _decoded(decode, kind)
        try:
            return decode()
        except msgspec.ValidationError:
            pass
        try:
            value = msgspec.json.decode(content)
        except msgspec.ValidationError:  # such as a number out of range, for which only a typed error has a path
            return _decoded(decode, kind)
        removed += remove_unknown_fields(value, kind)
        return _decoded(functools.partial(msgspec.convert, value, kind, str_keys=True), kind)
    except msgspec.DecodeError as error:
        hint = "; half of a surrogate pair is not a character" if _SURROGATE.search(content) else ""
        raise ApiError(400, f"the body is not valid JSON: {error}{hint}", code="invalid_json") from None
    except UnicodeDecodeError:  # its offset is one in a text of the body
        raise ApiError(400, _not_utf8(content), code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply; nest it less", code="invalid_json") from None


def _decoded(decode: Callable[..., Body], kind: type[Body]) -> Body:
    """Return what `decode` returns. Raises ApiError for what does not fit `kind`, strict or not."""
    try:
        return decode(strict=True)
    except msgspec.ValidationError as error:
        wrong = _wrong_field(str(error), kind)
    try:
        # 2.0 for an integer, "0.5" for a number: clients in languages without these types send them.
        return decode(strict=False)
    except msgspec.ValidationError:
        raise wrong from None


def _not_utf8(content: bytes) -> str:
    """Return where `content` is not UTF-8, as text for an error."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return f"the body is not valid UTF-8: {error.reason} at byte {error.start}"
    return "the body is not valid UTF-8"


def _wrong_field(message: str, kind: type[msgspec.Struct]) -> ApiError:
    """Return the error for a body that does not fit `kind`, from the decoder's `message`."""
    found = _AT_PATH.search(message)
    what, path = (message[: found.start()], found[1][1:].removeprefix(".")) if found else (message, "")
    if (unknown := _UNKNOWN_FIELD.fullmatch(what)) is not None:
        return _unknown_field(unknown[1], path, kind)
    if (missing := _MISSING_FIELD.fullmatch(what)) is not None:
        name = _join(path, missing[1])
        return ApiError(400, f"the field {name} is missing; add it", param=name)
    what = what[:1].lower() + what[1:_MAX_QUOTED]
    if not path:
        return ApiError(400, f"the body is wrong: {what}")
    declared = type_at(path, kind)
    if (why := mark(declared, "refused")) is not None:
        return ApiError(400, f"{path} {why}", param=path, code="unsupported_field")
    given = what.removeprefix("invalid value ")
    if given != what and (allowed := tags(path, kind)):
        message = f"{path} must be one of {', '.join(map(repr, allowed))}, got {given:.100}"
        return ApiError(400, message, param=path, code="unsupported_field")
    given = what.removeprefix("invalid enum value ")
    if given != what and (allowed := literals(declared)):
        return ApiError(400, f"{path} must be one of {', '.join(map(repr, allowed))}, got {given:.100}", param=path)
    return ApiError(400, f"{path} is wrong: {what}", param=path)


def _unknown_field(name: str, path: str, kind: type[msgspec.Struct]) -> ApiError:
    """Return the error for the field `name`, which the object at `path` does not have."""
    where = _join(path, name)[:_MAX_QUOTED]
    known = [field.encode_name for struct in structs(type_at(path, kind)) for field in msgspec.structs.fields(struct)]
    near = difflib.get_close_matches(name[:_MAX_QUOTED], known, 1)
    advice = f"did you mean {near[0]!r}?" if near else "leave it out"
    return ApiError(400, f"there is no field {where!r}; {advice}", param=where, code="unknown_field")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
