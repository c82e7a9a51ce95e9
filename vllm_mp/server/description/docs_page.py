"""The page /docs: the endpoints and their fields, written from the OpenAPI document."""

import html
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vllm_mp.server.description.openapi import openapi_document

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_HEAD = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    '<title>vllm-mp: endpoints</title><link rel="stylesheet" href="static/docs.css"><h1>Endpoints</h1>'
    '<p>The same as <a href="openapi.json">OpenAPI</a>, for programs.</p>'
)


async def show_docs(request: Request) -> Response:
    """Show the endpoints and their fields."""
    return Response(_page_of(request.app), media_type="text/html; charset=utf-8", headers=_HEADERS)


@lru_cache(maxsize=1)
def _page_of(app: Starlette) -> str:
    document = openapi_document(app.routes)
    schemas: dict[str, Any] = document["components"]["schemas"]
    operations = [
        (path, method, operation)
        for path, methods in sorted(document["paths"].items())
        for method, operation in methods.items()
    ]
    parts = [_HEAD, *(_operation(path, method, operation, schemas) for path, method, operation in operations)]
    parts.append("<h1>Objects</h1>")
    parts += [
        f'<h2 id="{_anchor(name)}">{html.escape(name)}</h2>{_description(schema)}{_fields(schema)}'
        for name, schema in sorted(schemas.items())
        if "properties" in schema
    ]
    return "".join(parts)


def _operation(path: str, method: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    title = f"<h2><code>{method.upper()} {html.escape(path)}</code></h2><p>{html.escape(operation['summary'])}</p>"
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    answer = operation["responses"]["200"].get("content", {}).get("application/json", {}).get("schema", {})
    asked = _fields(schemas.get(_name_of(body), {}))
    answered = f"<p>Answer: {_type(answer)}</p>" if answer else ""
    return title + asked + answered


def _fields(schema: dict[str, Any]) -> str:
    """Return the table of a schema's fields; empty if it has none."""
    required = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{html.escape(name)}</code>{' (required)' if name in required else ''}<td>{_type(field)}"
        f"<td>{html.escape(field.get('description', ''))}"
        for name, field in schema.get("properties", {}).items()
    )
    return f"<table><tr><th>field<th>type<th>meaning{rows}</table>" if rows else ""


def _description(schema: dict[str, Any]) -> str:
    return f"<p>{html.escape(schema['description'])}</p>" if "description" in schema else ""


def _type(schema: dict[str, Any]) -> str:
    """Return the type of a field as HTML, with links to objects."""
    return " or ".join(dict.fromkeys(_types(schema)))


def _types(schema: dict[str, Any]) -> Iterator[str]:
    if name := _name_of(schema):
        yield f'<a href="#{_anchor(name)}">{html.escape(name)}</a>'
    elif "enum" in schema:
        yield html.escape(", ".join(map(repr, schema["enum"])))
    elif "anyOf" in schema:
        for option in schema["anyOf"]:
            yield from _types(option)
    elif schema.get("type") == "array":
        yield f"list of ({_type(schema['items'])})" if "items" in schema else "list"
    else:
        yield html.escape(str(schema.get("type", "any value")))


def _name_of(schema: dict[str, Any]) -> str:
    return str(schema.get("$ref", "")).rpartition("/")[2]


def _anchor(name: str) -> str:
    return re.sub(r"\W", "-", name)


ROUTES = [Route("/docs", show_docs, include_in_schema=False)]
