"""Who may use the server: API keys, TLS, and the pages of other sites."""

import hashlib
import hmac
import ssl
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_mp.server.errors import ApiError
from vllm_mp.server.options import ServerOptions

KEY_VARIABLES: Final = ("VLLM_API_KEY", "VLLM_MP_API_KEY")
"""Environment variables that hold a key each."""

OPEN_PATHS: Final = frozenset({"/health", "/ready", "/version", "/"})
"""Paths that need no key: probes of orchestrators, and the page, which holds no data and asks for the key."""
OPEN_FOLDERS: Final = ("/static/",)
"""Beginnings of paths that need no key: the files of the page."""


def read_api_keys(options: ServerOptions, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the keys from `options`, their file and the environment; none: the server is open.

    Raises ValueError, naming the source, for an empty key, a key with spaces or for a file without keys, and OSError if
    the file cannot be read.
    """
    keys = [("api_key", key) for key in options.api_key]
    keys += [(name, environment[name]) for name in KEY_VARIABLES if name in environment]
    if options.api_key_file is not None:
        lines = [line.strip() for line in Path(options.api_key_file).read_text().splitlines()]
        in_file = [(f"api_key_file {options.api_key_file}", line) for line in lines if line]
        if not in_file:
            raise ValueError(f"api_key_file {options.api_key_file} holds no key; write a key into each line")
        keys += in_file
    for source, key in keys:
        if not key or not key.isascii() or any(character.isspace() for character in key):
            raise ValueError(f"{source} must be a key of ASCII characters without spaces; choose another key")
    return tuple(key for _, key in keys)


class RequireApiKey:
    """Middleware that refuses requests without one of the keys with status 401."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        # Digests have equal lengths, so a comparison does not tell the length of a key.
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_open(scope["path"]) and not self._has_key(scope):
            error = ApiError(
                401,
                "the API key is missing or wrong; send the header `Authorization: Bearer KEY`",
                type="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error.response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        return path in OPEN_PATHS or path.startswith(OPEN_FOLDERS)

    def _has_key(self, scope: Scope) -> bool:
        given = b""
        for name, value in scope["headers"]:
            if name == b"authorization":
                given = value
        scheme, _, key = given.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        # Every key is compared, so that the time does not tell which of them matches.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(matches)


def guards(options: ServerOptions) -> list[Middleware]:
    """Return the middleware that guards an application, outermost first."""
    layers = []
    if options.cors_allow_origin:
        # Before the keys, because a browser's preflight request carries no key.
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=options.cors_allow_origin,
                allow_methods=("GET", "POST"),
                # OpenAI's client in a browser sends many headers of its own.
                allow_headers=("*",),
                expose_headers=("X-Request-Id", "Retry-After"),
            )
        )
    if options.api_key:
        layers.append(Middleware(RequireApiKey, keys=options.api_key))
    return layers


def tls_context(options: ServerOptions) -> ssl.SSLContext | None:
    """Return the TLS settings; None for plain HTTP.

    Raises ValueError for options that contradict each other, and OSError, naming the files, if they cannot be used.
    """
    if options.ssl_certfile is None:
        if options.ssl_keyfile is not None or options.ssl_ca_certs is not None:
            raise ValueError("ssl_certfile is missing; give it with ssl_keyfile and ssl_ca_certs")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
        if options.ssl_ca_certs is not None:
            context.load_verify_locations(options.ssl_ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:  # of the ssl module too
        files = [name for name in (options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs) if name]
        raise OSError(f"cannot use the TLS files {', '.join(files)}: {error}; check paths and format (PEM)") from error
    return context
