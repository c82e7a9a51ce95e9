"""The endpoint /openapi.json: all endpoints in OpenAPI 3.1, derived from the routes and the structs of their bodies."""

import inspect
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from vllm_mp.server.http.endpoint import Endpoint
from vllm_mp.server.http.errors import ErrorBody
from vllm_mp.version import __version__

_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")
_REQUEST_ID = {
    "name": "X-Request-Id",
    "in": "header",
    "description": "The response repeats it. It is the id of the request too, unless it has other characters than "
    "request_id may have, or a live request has that id; then, and by default, the id is drawn.",
    "schema": {"type": "string"},
}
_STRICT = {
    "name": "Prefer",
    "in": "header",
    "description": "`handling=strict`: refuse fields that the server does not know; by default they are ignored.",
    "schema": {"type": "string", "examples": ["handling=strict"]},
}


async def show_openapi(request: Request) -> Response:
    """Return this document."""
    return Response(_document_of(request.app), media_type="application/json")


@lru_cache(maxsize=1)
def _document_of(app: Starlette) -> bytes:
    return msgspec.json.encode(openapi_document(app.routes))


def openapi_document(routes: Iterable[BaseRoute]) -> dict[str, Any]:
    """Return the description of `routes`; those with `include_in_schema=False` are left out."""
    described = [route for route in routes if isinstance(route, Route) and route.include_in_schema]
    endpoints = [route.app for route in described if isinstance(route.app, Endpoint)]
    structs = {struct: None for endpoint in endpoints for struct in (endpoint.body_type, endpoint.response_type)}
    schemas, components = msgspec.json.schema_components(
        [ErrorBody, *structs], ref_template="#/components/schemas/{name}"
    )
    for component in components.values():
        # Only strict requests are refused for fields that are not declared.
        if component.get("additionalProperties") is False:
            del component["additionalProperties"]
    by_struct = dict(zip([ErrorBody, *structs], schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in described:
        path = paths.setdefault(_PARAMETER.sub(r"{\1}", route.path), {})
        for method in sorted((route.methods or set()) - {"HEAD"}):
            path[method.lower()] = _operation(route, method, by_struct)
    return {
        "openapi": "3.1.0",
        "info": {"title": "vllm-mp", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        # A server without --api-key needs no key.
        "security": [{}, {"key": []}],
    }


def _operation(route: Route, method: str, schemas: dict[type[msgspec.Struct], dict[str, Any]]) -> dict[str, Any]:
    """Return the description of a route for one of its methods."""
    endpoint = route.app if isinstance(route.app, Endpoint) else None
    handler = route.endpoint if endpoint is None else endpoint.handler
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(route.path)
    ]
    error = {
        "description": "What went wrong.",
        "content": {"application/json": {"schema": schemas[ErrorBody]}},
    }
    answer: dict[str, Any] = {"description": "The answer."}
    operation: dict[str, Any] = {
        "operationId": method.lower() + re.sub(r"\W+", "_", route.path).rstrip("_"),
        "summary": (inspect.getdoc(handler) or route.name).partition("\n")[0],
        "parameters": parameters,
        "responses": {"200": answer, "default": error},
    }
    if endpoint is not None:
        parameters += [_REQUEST_ID, _STRICT]
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schemas[endpoint.body_type]}},
        }
        answer["content"] = {"application/json": {"schema": schemas[endpoint.response_type]}}
        if "stream" in endpoint.body_type.__struct_fields__:
            answer["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return operation


ROUTES = [Route("/openapi.json", show_openapi)]
