"""The body of a request: read with a bound, and decoded into a struct with errors that name the field."""

import asyncio
import codecs
import difflib
import re
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec
from starlette.requests import ClientDisconnect, Request

from vllm_mp.server.http.errors import ApiError
from vllm_mp.server.http.state import ServerState

Body = TypeVar("Body", bound=msgspec.Struct)


def refused(why: str = "is not served yet; leave it out") -> msgspec.Meta:
    """Return the mark of a field that refuses all values but the values of its type; the error is name and `why`."""
    return msgspec.Meta(description=f"It {why}.", extra={"refused": why})


Refused = Annotated[None, refused()]
"""The type of a field of OpenAI's API that is refused by name, unless it is null."""

Ignored = Annotated[
    Any, msgspec.Meta(description="Accepted; it has no effect here.", extra_json_schema={"x-has-effect": False})
]
"""The type of a field that describes the request and does not change its answer."""

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


class RequestBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The base of all bodies: a field that is not declared is refused by name."""


async def read_body(request: Request, kind: type[Body]) -> Body:
    """Return the body of `request` as a `kind`.

    Raises ApiError: 415 if it is not declared as JSON, 413 if it is larger than the option `max_body_bytes`, 408 if it
    does not arrive within the option `body_timeout`, and 400 if it is not JSON of this kind.
    """
    server: ServerState = request.app.state.server
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        # Other types need no consent of the server to be sent by a page of any site (CORS).
        raise ApiError(
            415,
            f"Content-Type must be application/json, got {media_type[:100] or 'none'!r}; set the header "
            "`Content-Type: application/json`",
            param="Content-Type",
        )
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        message = f"Content-Encoding must be identity, got {encoding[:100]!r}; send the body uncompressed"
        raise ApiError(415, message, param="Content-Encoding")
    options = server.options
    try:
        async with asyncio.timeout(options.body_timeout):
            content = await _read_bounded(request, options.max_body_bytes)
    except TimeoutError:
        message = f"the body did not arrive within {options.body_timeout:g} s; send it at once"
        raise ApiError(408, message, code="timeout", headers={"Connection": "close"}) from None
    return decode_body(content, kind)


async def _read_bounded(request: Request, limit: int) -> bytes:
    """Return the bytes of the body. Raises ApiError for more than `limit`, ClientDisconnect if the client hangs up."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        piece = message.get("body", b"")
        size += len(piece)
        if size > limit:
            raise _too_large(limit)
        pieces.append(piece)
        if not message.get("more_body", False):
            return b"".join(pieces)


def _too_large(limit: int) -> ApiError:
    message = f"the body is too large: the limit is {limit} bytes; send less, or raise --max-body-bytes"
    return ApiError(413, message, code="body_too_large")


def decode_body(content: bytes, kind: type[Body]) -> Body:
    """Return the JSON `content` as a `kind`. Raises ApiError, naming the field, if it is none or too much."""
    if content.count(b",") > _MAX_SEPARATORS:
        message = f"the body has too many values: the limit is {_MAX_SEPARATORS} commas; split it into several requests"
        raise ApiError(413, message, code="body_too_large")
    content = content.removeprefix(codecs.BOM_UTF8)
    try:
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.ValidationError as error:
            wrong = _wrong_field(str(error), kind)
        try:
            # 2.0 for an integer, "0.5" for a number: clients in languages without these types send them.
            return msgspec.json.decode(content, type=kind, strict=False)
        except msgspec.ValidationError:
            raise wrong from None
    except msgspec.DecodeError as error:
        hint = "; half of a surrogate pair is not a character" if _SURROGATE.search(content) else ""
        raise ApiError(400, f"the body is not valid JSON: {error}{hint}", code="invalid_json") from None
    except UnicodeDecodeError:  # its offset is one in a text of the body
        raise ApiError(400, _not_utf8(content), code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply; nest it less", code="invalid_json") from None


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
    declared = _type_at(path, kind)
    for meta in _metadata(declared):
        if meta.extra and "refused" in meta.extra:
            return ApiError(400, f"{path} {meta.extra['refused']}", param=path, code="unsupported_field")
    given = what.removeprefix("invalid enum value ")
    if given != what and (allowed := _literals(declared)):
        return ApiError(400, f"{path} must be one of {', '.join(map(repr, allowed))}, got {given:.100}", param=path)
    return ApiError(400, f"{path} is wrong: {what}", param=path)


def _unknown_field(name: str, path: str, kind: type[msgspec.Struct]) -> ApiError:
    """Return the error for the field `name`, which the object at `path` does not have."""
    where = _join(path, name)[:_MAX_QUOTED]
    known = [field.encode_name for struct in _structs(_type_at(path, kind)) for field in msgspec.structs.fields(struct)]
    near = difflib.get_close_matches(name[:_MAX_QUOTED], known, 1)
    advice = f"did you mean {near[0]!r}?" if near else "leave it out"
    return ApiError(400, f"there is no field {where!r}; {advice}", param=where, code="unknown_field")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _type_at(path: str, kind: Any) -> Any:
    """Return the declared type of the value at `path`, as "messages[0].role", in a body of type `kind`."""
    for name in re.findall(r"[^.\[\]]+", re.sub(r"\[[^\]]*\]", "", path)):
        fields = (field for struct in _structs(kind) for field in msgspec.structs.fields(struct))
        kind = next((field.type for field in fields if field.encode_name == name), None)
    return kind


def _structs(kind: Any) -> list[type[msgspec.Struct]]:
    """Return the structs that a value of type `kind` can be or hold, not looking into structs."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [kind]
    return [struct for part in get_args(kind) for struct in _structs(part)]


def _metadata(kind: Any) -> list[msgspec.Meta]:
    """Return the marks of the type `kind`, also of the members of a union."""
    if isinstance(kind, msgspec.Meta):
        return [kind]
    return [meta for part in get_args(kind) for meta in _metadata(part)]


def _literals(kind: Any) -> list[str | int]:
    """Return the values of the literals that the type `kind` is made of."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [value for part in get_args(kind) for value in _literals(part)]
