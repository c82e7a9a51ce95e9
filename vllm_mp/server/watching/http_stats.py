"""Counts of HTTP requests by endpoint and status, and the lag of the event loop."""

import asyncio
import time
from collections.abc import Iterable, Sequence

from starlette.routing import BaseRoute, Match, Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_mp.client.stats import Cells, Counter, Histogram

_STATUSES = (
    *(200, 204, 206, 304, 400, 401, 403, 404, 405, 408, 409, 411, 413, 414, 415, 422, 426, 429, 431, 499),
    *(500, 501, 502, 503, 504),
)
_HUNG_UP = "499"
"""The status of a request whose client hung up before the response began, as proxies log it."""
OTHER = "other"
"""The label of paths that are no endpoint, and of statuses beyond `_STATUSES`."""
_DURATION_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_LAG_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_BEAT_S = 0.5
"""Time between two measurements of the event loop's lag."""


class HttpStats:
    """The counters of a server process."""

    def __init__(self, cells: Cells, routes: Sequence[BaseRoute]) -> None:
        """`routes` are the app's; the label of an endpoint is its path as declared."""
        self._routes = routes
        self.endpoints = tuple(dict.fromkeys([*_paths(routes), OTHER]))
        self.statuses = (*map(str, _STATUSES), OTHER)
        self.requests = {endpoint: Counter(cells, self.statuses) for endpoint in self.endpoints}
        """By endpoint, with the status as label."""
        self.duration_s = {endpoint: Histogram(cells, _DURATION_S) for endpoint in self.endpoints}
        """By endpoint: from the end of a request's head to the last byte of its response."""
        self.lag_s = Histogram(cells, _LAG_S)
        self._known_statuses = {status: str(status) for status in _STATUSES}
        self._beats_on: asyncio.AbstractEventLoop | None = None

    def count(self, scope: Scope, status: int | None, seconds: float) -> None:
        """Count a request that has ended; `status` is None if its response never began."""
        endpoint = self._endpoint(scope)
        self.requests[endpoint].add(1, _HUNG_UP if status is None else self._known_statuses.get(status, OTHER))
        self.duration_s[endpoint].observe(seconds)

    def watch_lag(self) -> None:
        """Measure the lag of the running loop from now on: how late it calls what is due."""
        loop = asyncio.get_running_loop()
        if loop is self._beats_on:
            return
        self._beats_on = loop
        due = loop.time() + _BEAT_S

        def beat() -> None:
            nonlocal due
            now = loop.time()
            self.lag_s.observe(max(0.0, now - due))
            due = now + _BEAT_S
            loop.call_at(due, beat)

        loop.call_at(due, beat)

    def _endpoint(self, scope: Scope) -> str:
        path: str = scope["path"]
        if path in self.requests:
            return path
        for route in self._routes:
            if isinstance(route, Route | Mount) and route.matches(scope)[0] is not Match.NONE:
                return route.path or "/"
        return OTHER


class HttpStatsMiddleware:
    """Counts each request when its response has ended; must be the outermost middleware, to see every response."""

    def __init__(self, app: ASGIApp, stats: HttpStats) -> None:
        self._app = app
        self._stats = stats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._stats.watch_lag()
        started = time.monotonic()
        status: int | None = None

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note_status)
        except Exception:
            status = status or 500
            raise
        finally:
            self._stats.count(scope, status, time.monotonic() - started)


def _paths(routes: Iterable[BaseRoute]) -> list[str]:
    return [route.path or "/" for route in routes if isinstance(route, Route | Mount)]
