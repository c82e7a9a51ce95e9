"""The access log: a line for each request."""

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)


class AccessLog:
    """Middleware that logs client, method, path, status and seconds of each request; no query, header or body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        # The option asks for these lines, whatever the level of other logs.
        logger.setLevel(logging.INFO)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.monotonic(), 0

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note_status)
        finally:
            client = (scope.get("client") or ("-",))[0]
            path = scope.get("raw_path", scope["path"].encode()).decode("ascii", "backslashreplace")
            logger.info(
                "%s %s %s %s %.3f s",
                client,
                scope["method"],
                path,
                status or "no response",  # the client hung up before
                time.monotonic() - started,
            )
