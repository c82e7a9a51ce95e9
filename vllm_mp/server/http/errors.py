"""Errors as OpenAI's API reports them, and Anthropic's: a status code and a JSON object `error`."""

import http
import logging
import re
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from vllm_mp.errors import (
    ConstraintError,
    EngineDeadError,
    EngineError,
    EngineGenerateError,
    NoRoomError,
    RequestInterruptedError,
    TooManyConstraintsError,
)

logger = logging.getLogger(__name__)

_LOG_LINES = re.compile(r"; its (?:last )?log\b.*", re.DOTALL)
"""What follows the cause of a core's death: the last lines of its log, and where that is."""
_ANTHROPIC_PATHS = ("/v1/messages", "/v1/messages/count_tokens")
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's words for errors, by status; other statuses are "invalid_request_error", or "api_error" from 500 on."""
_NO_RETRY = {"x-should-retry": "false"}
"""Headers that keep OpenAI's and Anthropic's clients from repeating a request, as they do for other errors >= 500."""
_PROCESS_ID = re.compile(r"(?<=\bprocess) \d+\b")


class ErrorObject(msgspec.Struct):
    """What went wrong, as OpenAI's API describes it."""

    message: str
    type: str
    param: str | None
    """The field at fault, with its path; null if no field is."""
    code: str | None
    """A word for programs; null if the status says enough."""


class ErrorBody(msgspec.Struct):
    """The body of a response whose status is 400 or above, and the data of an event that ends a stream."""

    error: ErrorObject


class ApiError(Exception):
    """A request fails with an HTTP status and OpenAI's error object.

    Before the first byte of the response it becomes the response; after it, the last event of the stream.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        anthropic_code: str | None = None,
    ) -> None:
        """`message` says what is wrong and what to do; `param` names the field; `code` is for programs.

        `anthropic_code` is the word for clients of Anthropic's API, which their `error.details` hold.
        """
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = headers
        self.anthropic_code = anthropic_code

    def __reduce__(self) -> Any:  # so that it can be pickled
        return type(self), (self.status, self.message), self.__dict__

    def data(self) -> ErrorBody:
        """Return the error as the body of a response, or as the data of an event."""
        # Half a surrogate pair, as a header or a path may hold it, has no UTF-8.
        message = self.message.encode("utf-8", "backslashreplace").decode()
        return ErrorBody(ErrorObject(message, self.type, self.param, self.code))

    def body(self) -> bytes:
        """Return `data` as JSON."""
        return msgspec.json.encode(self.data())

    def anthropic_body(self) -> bytes:
        """Return the error as Anthropic's API writes it, as JSON."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        error: dict[str, Any] = {"type": kind, "message": self.data().error.message}
        if self.anthropic_code is not None:
            error["details"] = {"error_code": self.anthropic_code}
        return msgspec.json.encode({"type": "error", "error": error})

    def response(self, path: str = "") -> Response:
        """Return the error as a response to a request to `path`."""
        body = self.anthropic_body() if path.endswith(_ANTHROPIC_PATHS) else self.body()
        return Response(body, self.status, self.headers, "application/json")


def as_api_error(error: Exception) -> ApiError:
    """Return what a client is told about `error`; an error that nothing foresees is logged with its traceback."""
    match error:
        case ApiError():
            return error
        case HTTPException():
            return _framework_error(error)
        case ConstraintError():
            return ApiError(400, str(error), code="invalid_constraint")
        case NoRoomError():
            headers = {"Retry-After": "1"}
            return ApiError(429, str(error), type="rate_limit_error", code="too_many_requests", headers=headers)
        case TooManyConstraintsError():
            headers = {"Retry-After": "1"}
            return ApiError(429, str(error), type="rate_limit_error", code="too_many_constraints", headers=headers)
        case RequestInterruptedError():
            return ApiError(503, public_text(error), type="server_error", code="request_interrupted")
        case EngineGenerateError():
            message = public_text(error)
            return ApiError(500, message, type="server_error", code="generation_failed", headers=_NO_RETRY)
        case EngineDeadError():
            message = f"the engine is gone for good: {public_text(error)}"
            return ApiError(503, message, type="server_error", code="engine_dead")
        case EngineError():
            return ApiError(503, public_text(error), type="server_error", code="engine_unavailable")
        case TimeoutError():
            return ApiError(504, str(error), type="server_error", code="timeout", headers=_NO_RETRY)
        case _:
            logger.error("a request failed unexpectedly", exc_info=error)
            what = f"{type(error).__name__}; the server's log says more"
            return ApiError(500, f"internal error: {what}", type="server_error", code="internal_error")


def public_text(error: Exception) -> str:
    """Return the text of an error of the engine without what only an operator may read: log lines, paths and pids."""
    return _PROCESS_ID.sub("", _LOG_LINES.sub("; the server's log says more", str(error)))


def as_refusal(error: Exception, fields: tuple[str, ...] = ()) -> ApiError:
    """Return what a client is told about `error`, which the engine raised for a request's parameters or prompt.

    ValueError, TypeError and NotImplementedError say that the request is wrong. If the message begins with one of
    `fields`, the error names that field.
    """
    if not isinstance(error, ValueError | TypeError | NotImplementedError):
        return as_api_error(error)
    message = str(error).removeprefix("SamplingParams.")
    name = re.match(r"\w*", message)
    # OpenAI's clients know this code.
    code = "context_length_exceeded" if message.startswith("the prompt is too long") else None
    return ApiError(400, message, param=name[0] if name and name[0] in fields else None, code=code)


def _framework_error(error: HTTPException) -> ApiError:
    """Return an error of the web framework, such as an unknown path, in OpenAI's shape."""
    phrase = http.HTTPStatus(error.status_code).phrase
    message = error.detail if error.detail != phrase else phrase.lower()
    return ApiError(error.status_code, message, headers=dict(error.headers or {}) or None)


async def error_response(request: Request, error: Exception) -> Response:
    """Return the response for an error that no endpoint handled; an exception handler of the app."""
    path = f"{request.method} {request.url.path:.200}"
    if isinstance(error, HTTPException) and error.status_code == 404:
        missing = ApiError(404, f"there is no endpoint {path}; /openapi.json lists them", code="not_found")
        return missing.response(request.url.path)
    if isinstance(error, HTTPException) and error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{path} is not allowed; allowed: {allowed}"
        refused = ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed})
        return refused.response(request.url.path)
    return as_api_error(error).response(request.url.path)
