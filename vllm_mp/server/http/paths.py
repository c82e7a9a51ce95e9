"""The paths of requests as the routes have them."""

from starlette.types import ASGIApp, Receive, Scope, Send


class PlainPaths:
    """Middleware that removes the prefix of a proxy, and the slash at the end of a path.

    No client is redirected, which some do not follow. A path without the prefix stays as it is, because some proxies
    remove the prefix themselves.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._prefix = f"/{root_path.strip('/')}/" if root_path.strip("/") else ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path: str = scope["path"]
            if self._prefix and f"{path}/".startswith(self._prefix):
                path = f"/{path[len(self._prefix) :]}"
            scope = {**scope, "path": path.rstrip("/") or "/"}
        await self._app(scope, receive, send)
