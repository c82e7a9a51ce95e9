"""The ASGI application: routes, middleware and error handlers, put together."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import BaseRoute

from vllm_mp.client.async_llm import AsyncLLM
from vllm_mp.errors import EngineError
from vllm_mp.server import invocations
from vllm_mp.server.anthropic import endpoint as anthropic
from vllm_mp.server.description import docs_page, openapi
from vllm_mp.server.http.access_log import AccessLog
from vllm_mp.server.http.admission import Admission
from vllm_mp.server.http.errors import ApiError, error_response
from vllm_mp.server.http.options import ServerOptions
from vllm_mp.server.http.parsers import load_parsers
from vllm_mp.server.http.paths import PlainPaths
from vllm_mp.server.http.security import guards
from vllm_mp.server.http.shared_state import SharedState
from vllm_mp.server.http.state import ServerState
from vllm_mp.server.http.tenants import num_tenants
from vllm_mp.server.openai import adapters, chat, completions, models, render, token_generation, tokenization
from vllm_mp.server.openai.responses import endpoint as responses
from vllm_mp.server.operators import calls as operators
from vllm_mp.server.pooling import classes, embeddings, scores
from vllm_mp.server.watching import health, live, metrics, static_page
from vllm_mp.server.watching.http_stats import HttpStats, HttpStatsMiddleware

_ENDPOINTS = (
    completions,
    chat,
    responses,
    anthropic,
    embeddings,
    classes,
    scores,
    invocations,
    operators,
    models,
    adapters,
    tokenization,
    render,
    token_generation,
    docs_page,
    health,
    metrics,
    openapi,
    live,
    static_page,
)
"""The modules that serve endpoints."""


def build_app(
    engine: AsyncLLM, options: ServerOptions, admission: Admission | None = None, shared: SharedState | None = None
) -> Starlette:
    """Return the application that serves `engine`, which the caller shuts down afterwards.

    By default, its admission counts the requests of this process alone. `shared` is what it shares with others. Raises
    ValueError if `options` name a parser that does not exist.
    """
    load_parsers(options)
    if admission is None:
        limit = options.max_live_requests(engine.vllm_config.scheduler_config.max_num_seqs)
        admission = Admission(limit, num_tenants=num_tenants(options))
    routes: list[BaseRoute] = [route for module in _ENDPOINTS for route in module.ROUTES]
    handled = (ApiError, EngineError, HTTPException, Exception)
    http_stats = HttpStats(engine.stats.cells, routes)
    # The outermost is first: it counts every response, refusals too.
    middleware = [Middleware(HttpStatsMiddleware, stats=http_stats)]
    if options.access_log:
        middleware.append(Middleware(AccessLog))
    middleware += [Middleware(PlainPaths, root_path=options.root_path), *guards(options)]
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=dict.fromkeys(handled, error_response))
    app.state.server = ServerState(engine, options, admission, shared)
    app.state.metrics = metrics.metrics_registry(engine, http_stats, app.state.server.ignored_fields)
    return app
