"""The endpoints for operators: sleep and pause, the prefix cache, the profiler, calls of workers, aborts."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vllm_mp.client.async_llm import AsyncLLM
from vllm_mp.errors import EngineDeadError, EngineError, NotOperatorError
from vllm_mp.server.http.body import RequestBody, is_strict, read_body
from vllm_mp.server.http.endpoint import without_index
from vllm_mp.server.http.errors import ApiError, as_api_error, as_refusal
from vllm_mp.server.operators.access import check_operator

_SWITCH = {"true": True, "1": True, "false": False, "0": False}
_PREFIXES = {"resp_": "resp-", "msg_": "msg-"}
"""How ids in responses begin, and how the ids of the engine's requests begin in their place."""
T = TypeVar("T")
Parameters = dict[str, Any]


class WorkerCall(RequestBody):
    """A method that every worker runs."""

    method: str
    args: list[Any] | None = None
    kwargs: dict[str, Any] | None = None
    timeout: float | None = None
    """In seconds; default: the engine's `engine_iteration_timeout_s`."""


class AbortBody(RequestBody):
    """Requests to end."""

    request_ids: list[str]
    """The ids in their responses."""


async def sleep(request: Request) -> Response:
    """Release the memory of weights and KV cache until /wake_up; `level` and `mode` are in the query."""
    given = _query(request, level=int, mode=str)
    return await _done(request, lambda engine: engine.sleep(**given))


async def wake_up(request: Request) -> Response:
    """End a sleep; `tags` in the query, which may be repeated, name what comes back."""
    tags = request.query_params.getlist("tags") or None
    return await _done(request, lambda engine: engine.wake_up(tags))


async def is_sleeping(request: Request) -> Response:
    """Return whether the engine sleeps."""
    return _json({"is_sleeping": await _asked(request, lambda engine: engine.is_sleeping())})


async def pause(request: Request) -> Response:
    """Stop generation until /resume; `mode` and `clear_cache` are in the query."""
    given = _query(request, mode=str, clear_cache=bool, wait_for_inflight_requests=bool)
    return await _done(request, lambda engine: engine.pause_generation(**given))


async def resume(request: Request) -> Response:
    """End a pause."""
    return await _done(request, lambda engine: engine.resume_generation())


async def is_paused(request: Request) -> Response:
    """Return whether the engine is paused."""
    return _json({"is_paused": await _asked(request, lambda engine: engine.is_paused())})


async def reset_prefix_cache(request: Request) -> Response:
    """Empty the prefix cache."""
    given = _query(request, reset_running_requests=bool, reset_connector=bool)
    return await _done(request, lambda engine: engine.reset_prefix_cache(**given))


async def start_profile(request: Request) -> Response:
    """Record the core's next steps with PyTorch's profiler."""
    return await _done(request, lambda engine: engine.start_profile())


async def stop_profile(request: Request) -> Response:
    """Stop the profiler, and return the folder of its trace on the core's machine."""
    return _json({"folder": await _asked(request, lambda engine: engine.stop_profile())})


async def collective_rpc(request: Request) -> Response:
    """Run a method of every worker and return the results, one for each core and rank."""
    server = check_operator(request)
    body = await read_body(request, WorkerCall, server.options, None)
    results = await _asked(
        request,
        lambda engine: engine.collective_rpc(body.method, body.timeout, tuple(body.args or ()), body.kwargs),
    )
    return _json({"results": results})


async def restart_core(request: Request) -> Response:
    """Replace the core by a new process without ending a stream, and answer when that serves."""
    try:
        return await _done(request, lambda engine: engine.restart_core())
    except OSError as error:
        raise ApiError(503, f"the core goes on: no process can start: {error}") from None


async def abort_requests(request: Request) -> Response:
    """End requests of this server process; unknown ids are ignored."""
    server = check_operator(request)
    ignored = None if is_strict(request, server.options) else server.ignored_fields
    body = await read_body(request, AbortBody, server.options, ignored)
    return await _done(request, lambda engine: engine.abort(_engine_ids(engine, body.request_ids)))


async def server_info(request: Request) -> Response:
    """Return the configuration of the engine."""
    server = check_operator(request)
    config = msgspec.json.encode(server.engine.vllm_config, enc_hook=str)
    return _json({"vllm_config": msgspec.Raw(config)})


async def _done(request: Request, act: Callable[[AsyncLLM], Awaitable[object]]) -> Response:
    await _asked(request, act)
    return Response(status_code=200)


async def _asked(request: Request, ask: Callable[[AsyncLLM], Awaitable[T]]) -> T:
    """Return what the engine answers to an operator. Raises ApiError if it refuses or takes too long."""
    server = check_operator(request)
    try:
        return await ask(server.engine)
    except NotOperatorError as error:
        raise ApiError(403, str(error), type="permission_error") from None
    except EngineDeadError:
        raise
    except EngineError as error:  # such as a profiler that runs already
        raise ApiError(400, str(error)) from None
    except TimeoutError as error:
        raise as_api_error(error) from None
    except (ValueError, TypeError, NotImplementedError) as error:
        raise as_refusal(error, tuple(request.query_params)) from None


def _query(request: Request, **kinds: type) -> Parameters:
    """Return the parameters of the query that are given. Raises ApiError for a value of another kind."""
    found: Parameters = {}
    for name, kind in kinds.items():
        given = request.query_params.get(name)
        if given is None:
            continue
        try:
            found[name] = _SWITCH[given.lower()] if kind is bool else kind(given)
        except (ValueError, KeyError):
            wanted = "true or false" if kind is bool else "an integer"
            raise ApiError(400, f"{name} must be {wanted}, got {given[:50]!r}", param=name) from None
    return found


def _engine_ids(engine: AsyncLLM, given: list[str]) -> list[str]:
    """Return the ids of the engine's live requests, one for each prompt, behind the ids `given` of responses."""
    wanted = set(given)
    for each in given:
        prefix = next(filter(each.startswith, _PREFIXES), "")
        # The responses of /inference/v1/generate have the id without a prefix.
        wanted.add(_PREFIXES.get(prefix, "gen-") + each.removeprefix(prefix))
    return [live for live in engine.output_processor.ids() if without_index(live) in wanted]


def _json(content: dict[str, Any]) -> Response:
    headers = {"Cache-Control": "no-store"}
    return Response(msgspec.json.encode(content), 200, headers, "application/json")


_CALLS = (
    sleep,
    wake_up,
    pause,
    resume,
    reset_prefix_cache,
    start_profile,
    stop_profile,
    collective_rpc,
    restart_core,
    abort_requests,
)
ROUTES = [
    *(Route(f"/{handler.__name__}", handler, methods=["POST"]) for handler in _CALLS),
    *(Route(f"/{handler.__name__}", handler) for handler in (is_sleeping, is_paused, server_info)),
]
