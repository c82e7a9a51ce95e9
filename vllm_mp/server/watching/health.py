"""The endpoints that say how server and core are: /health, /ping, /ready, /load, /version and /core_status."""

import asyncio
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from vllm_mp.errors import EngineError
from vllm_mp.server.http.admission import RETRY_AFTER
from vllm_mp.server.http.errors import ApiError, public_text
from vllm_mp.server.http.state import ServerState
from vllm_mp.server.http.tenants import has_key
from vllm_mp.server.watching import static_page
from vllm_mp.version import __version__


async def health(request: Request) -> Response:
    """Return 200 while the server can serve, or can bring the core back; 503 once the core is gone for good."""
    server: ServerState = request.app.state.server
    if (error := server.engine.dead_error) is not None:
        return _json({"status": "dead", "reason": public_text(error)}, 503)
    return _json({"status": "ok"})


async def ping(request: Request) -> Response:
    """Return 200 while the server can serve, or can bring the core back; 503 once the core is gone for good."""
    answer = await health(request)
    return Response(status_code=answer.status_code)


async def load(request: Request) -> Response:
    """Return the number of live requests of this server process."""
    server: ServerState = request.app.state.server
    return _json({"server_load": server.admission.num_live})


async def ready(request: Request) -> Response:
    """Return 200 if requests are admitted and the core answers within the option `ready_timeout`, else 503.

    The status is "ready", "starting" (also while the core does not answer), "draining" or "dead".
    """
    server: ServerState = request.app.state.server
    if (refusal := server.admission.refusal) is not None:
        return _not_ready(request, "draining", refusal.message)
    if server.shared is not None and (num_loading := server.shared.num_loading):
        return _not_ready(request, "starting", f"{num_loading} of the server's processes are loading")
    try:
        await server.ping_core()
    except EngineError as error:
        return _not_ready(request, "starting" if server.engine.dead_error is None else "dead", public_text(error))
    return _json({"status": "ready"})


async def version(request: Request) -> Response:
    """Return the version of the server."""
    return _json({"version": __version__})


async def core_status(request: Request) -> Response:
    """Return the core's status from itself, or what is known without it if it does not answer in time."""
    server: ServerState = request.app.state.server
    try:
        async with asyncio.timeout(server.options.ready_timeout):
            return _json({"answers": True} | await server.engine.core_status())
    except (TimeoutError, EngineError):
        return _json({"answers": False} | server.engine.last_core_status())


PROBE_ROUTES = [Route("/health", health), Route("/ready", ready)]
ROUTES = [
    *PROBE_ROUTES,
    Route("/ping", ping, methods=["GET", "POST"]),
    Route("/load", load),
    Route("/version", version),
    Route("/core_status", core_status),
]


def loading_app() -> Starlette:
    """Return the application that answers until the engine has loaded: /health with 200, requests with 503.

    The page waits until it gets another answer.
    """

    async def loading_health(request: Request) -> Response:
        return _json({"status": "ok"})

    async def loading_ready(request: Request) -> Response:
        return _json({"status": "starting"}, 503)

    return Starlette(
        routes=[
            Route("/health", loading_health),
            Route("/ready", loading_ready),
            Route("/version", version),
            *static_page.ROUTES,
            Mount("/", _refuse),
        ]
    )


_LOADING = "the server is loading the model"


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    error = ApiError(
        503, f"{_LOADING}; repeat the request later", type="server_error", code="loading", headers=RETRY_AFTER
    )
    await error.response()(scope, receive, send)


def _not_ready(request: Request, status: str, reason: str) -> Response:
    """Return the status, and to those who may use the server the reason."""
    server: ServerState = request.app.state.server
    if server.options.api_key and not has_key(request.scope):
        return _json({"status": status}, 503)
    return _json({"status": status, "reason": reason}, 503)


def _json(content: dict[str, Any], status: int = 200) -> Response:
    # The state of a moment must not be repeated by a cache.
    return Response(msgspec.json.encode(content), status, {"Cache-Control": "no-store"}, "application/json")
