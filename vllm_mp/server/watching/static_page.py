"""The page at `/`: its static files, served from memory."""

import hashlib
from importlib import resources
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vllm_mp.server.http.errors import ApiError

_MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
"""By suffix. The system's table of types is not used: a wrong entry there would break the page."""
_HEADERS = {
    # Nothing comes from another origin, no markup holds scripts or styles, and no other page may frame this one. The
    # images that a user adds to a message are data URLs; answers show no images.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    # Kept by browsers, but used only if the server confirms the ETag: a new version shows at once.
    "Cache-Control": "no-cache",
}


class _File(NamedTuple):
    content: bytes
    headers: dict[str, str]


def _read_files() -> dict[str, _File]:
    """Return the files of the folder `page`, by name."""
    files = {}
    for path in resources.files("vllm_mp.server.watching").joinpath("page").iterdir():
        media_type = _MEDIA_TYPES.get(path.name.rpartition(".")[2])
        if media_type is not None:
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            files[path.name] = _File(content, {**_HEADERS, "Content-Type": media_type, "ETag": etag})
    return files


_FILES = _read_files()


async def page(request: Request) -> Response:
    """Return a file of the page, or 304 if the browser has it."""
    file = _FILES.get(request.path_params.get("name", "index.html"))
    if file is None:
        raise ApiError(404, f"no such file: {request.url.path}; the page is at /", code="not_found")
    if file.headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=file.headers)
    return Response(file.content, headers=file.headers)


ROUTES = [Route("/", page, include_in_schema=False), Route("/static/{name}", page, include_in_schema=False)]
