"""The body of a request is read with a bound on its size and on its time."""

import asyncio
import functools
import re

from starlette.requests import ClientDisconnect, Request

from vllm_mp.client.threads.background_call import call_in_thread
from vllm_mp.server.http.body.decoding import Body, decode_body
from vllm_mp.server.http.body.ignored_fields import IgnoredFields
from vllm_mp.server.http.body.unknown_fields import RemovedField
from vllm_mp.server.http.errors import ApiError
from vllm_mp.server.http.options import ServerOptions

_STRICT = re.compile(r"(?:^|[,;])\s*handling\s*=\s*\"?strict\"?\s*(?:[,;]|$)", re.IGNORECASE)
"""The preference of the header Prefer (RFC 7240) for an error instead of a field that is ignored."""
_MAX_INLINE_BYTES = 2**18


def is_strict(request: Request, options: ServerOptions) -> bool:
    """Return whether fields that the server does not know are refused: by the server, or as the request prefers."""
    return options.strict_requests or bool(_STRICT.search(",".join(request.headers.getlist("prefer"))))


async def read_body(request: Request, kind: type[Body], options: ServerOptions, ignored: IgnoredFields | None) -> Body:
    """Return the body of `request` as a `kind`. Fields that `kind` lacks go to `ignored`; None: they are refused.

    Raises ApiError: 415 if it is not declared as JSON, 413 if it is larger than the option `max_body_bytes`, 408 if it
    does not arrive within the option `body_timeout`, and 400 if it is not JSON of this kind.
    """
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
    try:
        async with asyncio.timeout(options.body_timeout):
            content = await _read_bounded(request, options.max_body_bytes)
    except TimeoutError:
        message = f"the body did not arrive within {options.body_timeout:g} s; send it at once"
        raise ApiError(408, message, code="timeout", headers={"Connection": "close"}) from None
    if ignored is None:
        return decode_body(content, kind)
    removed: list[RemovedField] = []
    decode = functools.partial(decode_body, content, kind, removed)
    # Fields are removed by Python code, beside which the event loop must go on.
    body = decode() if len(content) <= _MAX_INLINE_BYTES else await call_in_thread(decode)
    ignored.add(removed)
    return body


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
