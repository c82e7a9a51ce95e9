"""The endpoint /invocations, at which SageMaker sends requests of all kinds: it passes each on by its fields."""

from collections import deque

import msgspec
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from vllm_mp.server.http.endpoint import Endpoint
from vllm_mp.server.http.errors import ApiError

_BY_FIELDS = (
    ({"messages"}, "/v1/chat/completions"),
    ({"prompt"}, "/v1/completions"),
    ({"query", "documents"}, "/v1/rerank"),
    ({"text_1"}, "/v1/score"),
    ({"input"}, "/v1/embeddings"),
)
"""The endpoint for a body that has all of these fields; the first that fits."""


async def invoke(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request as the endpoint does that its fields belong to."""
    app: Starlette = scope["app"]
    limit = app.state.server.options.max_body_bytes
    messages: deque[Message] = deque()
    size, more = 0, True
    while more:
        message = await receive()
        messages.append(message)
        size += len(message.get("body", b""))
        # The endpoint refuses a body that is too large, or a client that hangs up.
        more = message["type"] == "http.request" and message.get("more_body", False) and size <= limit
    path = _path(b"".join(message.get("body", b"") for message in messages)) if size <= limit else _BY_FIELDS[0][1]
    if path is None:
        wanted = "; ".join(" and ".join(sorted(fields)) for fields, _ in _BY_FIELDS)
        await ApiError(400, f"the body belongs to no endpoint; give the fields of one: {wanted}").response()(
            scope, receive, send
        )
        return

    async def replay() -> Message:
        return messages.popleft() if messages else await receive()

    endpoint = next(route.app for route in app.routes if isinstance(route, Route) and route.path == path)
    assert isinstance(endpoint, Endpoint)
    await endpoint(scope, replay, send)


def _path(content: bytes) -> str | None:
    """Return the path of the endpoint for a body; that of chats for one that is no object, which they refuse."""
    try:
        fields = msgspec.json.decode(content, type=dict[str, msgspec.Raw]).keys()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _BY_FIELDS[0][1]
    return next((path for needed, path in _BY_FIELDS if needed <= fields), None)


class _Invocations:
    """An ASGI application, which Starlette does not take for a function of a request."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await invoke(scope, receive, send)


ROUTES = [Route("/invocations", _Invocations(), methods=["POST"], name=invoke.__name__)]
