"""What all JSON endpoints share: the body, the request id, the timeout, and a client that hangs up."""

import asyncio
import contextlib
import re
import types
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Self

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from vllm_mp.server.http.body import Body, IgnoredFields, RemovedField, is_strict, read_body
from vllm_mp.server.http.errors import ApiError, as_api_error
from vllm_mp.server.http.event_stream import EventStream
from vllm_mp.server.http.protocol import WRITE_NOW, WriteNow
from vllm_mp.server.http.state import ServerState
from vllm_mp.server.http.tenants import Tenant

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
"""Ids of requests: characters that are harmless in headers, logs and JSON."""
_INDEX_MARK = "#"
"""Stands before the index of a prompt in the ids of its engine's requests. No id of a request has it."""
_RANK = re.compile(r"[0-9]{1,9}")


def json_response(content: object) -> Response:
    """Return a response with `content` as JSON."""
    return Response(msgspec.json.encode(content), media_type="application/json")


@dataclass
class Call:
    """An HTTP request to an endpoint, with what its handler needs beside the body."""

    server: ServerState
    http: Request
    tenant: Tenant
    """The holder of the request's API key."""
    request_id: str
    """From the field `request_id` or the header X-Request-Id, or drawn."""
    resources: contextlib.AsyncExitStack
    """Closed after the last byte of the response, when the client hangs up, or when the time is up."""

    ignored: IgnoredFields | None
    """Where fields go that are ignored; None: the request is refused for them."""

    @property
    def write_now(self) -> WriteNow:
        """Writes a part of the response without waiting, if that is possible."""
        write: WriteNow = self.http.scope.get("extensions", {}).get(WRITE_NOW, _write_nothing)
        return write

    def ignore(self, path: str, why: str) -> None:
        """Ignore the field at `path`, with a line in the log that says `why`. Raises ApiError for a strict request."""
        if self.ignored is None:
            raise ApiError(400, f"{path} {why}", param=path)
        self.ignored.add([RemovedField(path, f"it {why}")])


Handler = Callable[[Call, Body], Awaitable[Response | EventStream]]


class Endpoint(Generic[Body]):
    """An ASGI application that serves one operation: it reads the body, calls the handler and sends its response.

    The handler runs in the task of the request. That task is cancelled when the client hangs up, and after the option
    `request_timeout`.
    """

    def __init__(self, handler: Handler[Body], body_type: type[Body], response_type: type[msgspec.Struct]) -> None:
        """`response_type` describes a response that is not a stream, for the OpenAPI document."""
        self.handler = handler
        self.body_type = body_type
        self.response_type = response_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        server: ServerState = request.app.state.server
        response: Response | EventStream | None = None
        drawn_id = uuid.uuid4().hex
        shown_id = given_id = request.headers.get("x-request-id") or drawn_id
        try:
            ignored = None if is_strict(request, server.options) else server.ignored_fields
            body = await read_body(request, self.body_type, server.options, ignored)
            if (own_id := getattr(body, "request_id", None)) is not None:
                request_id = shown_id = _check_request_id(own_id)
            else:
                # A service mesh sends one header with all calls of a request that it serves, so it must refuse none.
                is_usable = _REQUEST_ID.fullmatch(given_id) and given_id not in server.live_ids
                request_id = given_id if is_usable else drawn_id
            limit = server.options.request_timeout
            async with _HangUp(receive), _time_limit(limit), contextlib.AsyncExitStack() as resources:
                resources.enter_context(server.holding_id(request_id))
                call = Call(server, request, server.tenants.of(scope), request_id, resources, ignored)
                response = await self.handler(call, body)
                response.headers["X-Request-Id"] = shown_id
                await response(scope, receive, send)
        except ClientDisconnect:
            pass
        except Exception as error:
            # No variable here may hold the error, whose traceback holds this frame: the body and its images would stay
            # in memory until the next garbage collection.
            if isinstance(response, EventStream) and response.has_started:
                await response.fail(as_api_error(error), send)
            else:
                refusal = as_api_error(error).response(request.url.path)
                refusal.headers["X-Request-Id"] = shown_id
                await refusal(scope, receive, send)


def prompt_id(request_id: str, index: int) -> str:
    """Return the id by which the engine knows the prompt `index` of a request with several prompts."""
    return f"{request_id}{_INDEX_MARK}{index}"


def without_index(engine_id: str) -> str:
    """Return the id of the request to which the engine's request `engine_id` belongs."""
    return engine_id.partition(_INDEX_MARK)[0]


def post(path: str, handler: Handler[Body], body_type: type[Body], response_type: type[msgspec.Struct]) -> Route:
    """Return the route of an operation that takes a JSON body by POST."""
    return Route(path, Endpoint(handler, body_type, response_type), methods=["POST"], name=handler.__name__)


def read_rank(request: Request) -> int | None:
    """Return the header X-data-parallel-rank, the rank of the core that shall serve a request; None without it.

    Raises ApiError unless its value is an integer.
    """
    given = request.headers.get("x-data-parallel-rank")
    if given is None:
        return None
    if not _RANK.fullmatch(given):
        name = "X-data-parallel-rank"
        raise ApiError(400, f"{name} must be the rank of a core, such as 0, got {given[:50]!r}", param=name)
    return int(given)


def _check_request_id(given: str) -> str:
    """Return `given`, the field `request_id`. Raises ApiError if it is not allowed as an id."""
    if not _REQUEST_ID.fullmatch(given):
        raise ApiError(
            400,
            f"request_id must be of 1 to 128 characters, letters, digits or any of ._:/+=@-, got {given[:50]!r}",
            param="request_id",
        )
    return given


def _write_nothing(part: bytes) -> bool:
    return False


@contextlib.asynccontextmanager
async def _time_limit(seconds: float | None) -> AsyncGenerator[None, None]:
    """Cancel the block after `seconds`, and raise TimeoutError with the remedy."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        if error.args:  # an error of the block itself
            raise
        message = f"the response was not complete after {seconds:g} s, the server's --request-timeout; ask for less"
        raise TimeoutError(message) from None


class _HangUp:
    """A block of a task that is cancelled when the client of its HTTP request hangs up."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._hung_up = False

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watch = asyncio.create_task(self._cancel_on_disconnect())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> bool:
        self._watch.cancel()
        return self._hung_up and self._task.uncancel() == 0 and kind is asyncio.CancelledError

    async def _cancel_on_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._hung_up = True
        self._task.cancel()
