"""Errors as OpenAI's API reports them: a status code and a JSON object `error`."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response


class ApiError(Exception):
    """A request fails with an HTTP status and OpenAI's error object.

    Endpoints raise it before the first byte of their response; `api_error_response` turns it into the response.
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
    ) -> None:
        """`message` says what is wrong and what to do; `param` names the field; `code` is for programs."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> bytes:
        """Return the JSON of the error, as a response body or the data of an event."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


async def api_error_response(request: Request, error: Exception) -> Response:
    """Return the response for an `ApiError`; an exception handler of the app."""
    assert isinstance(error, ApiError)
    return Response(error.body(), error.status, error.headers, "application/json")
