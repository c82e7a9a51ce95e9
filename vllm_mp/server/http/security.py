"""Who may use the server: API keys, TLS, and web pages of other sites."""

import hashlib
import hmac
import ipaddress
import socket
import ssl
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_mp.server.http.errors import ApiError
from vllm_mp.server.http.options import ServerOptions
from vllm_mp.server.http.tenants import different_keys, note_tenant

KEY_VARIABLES: Final = ("VLLM_API_KEY", "VLLM_MP_API_KEY")
"""Environment variables that hold a key each."""
OPERATOR_KEY_VARIABLE: Final = "VLLM_MP_OPERATOR_KEY"

OPEN_PATHS: Final = frozenset({"/health", "/ping", "/ready", "/version", "/"})
"""Paths that need no key: probes of orchestrators, and the page, which holds no data and asks for the key."""
OPERATOR_PATHS: Final = frozenset(
    {
        *("/sleep", "/wake_up", "/is_sleeping", "/pause", "/resume", "/is_paused", "/reset_prefix_cache"),
        *("/start_profile", "/stop_profile", "/collective_rpc", "/abort_requests", "/server_info"),
        "/restart_core",
    }
)
"""Paths that need an operator's key, which their handlers check, instead of an API key."""
OPEN_FOLDERS: Final = ("/static/",)
"""Beginnings of paths that need no key: the files of the page."""


def read_api_keys(options: ServerOptions, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the keys from `options`, their file and the environment; none: the server is open.

    Raises ValueError, naming the source, for an empty key, a key with spaces or for a file without keys, and OSError if
    the file cannot be read.
    """
    return _read_keys("api_key", options.api_key, options.api_key_file, KEY_VARIABLES, environment)


def read_operator_keys(options: ServerOptions, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the keys of operators, as `read_api_keys` does those of others; none: there are no operators."""
    variables = (OPERATOR_KEY_VARIABLE,)
    return _read_keys("operator_key", options.operator_key, options.operator_key_file, variables, environment)


def _read_keys(
    option: str, given: Sequence[str], file: str | None, variables: Sequence[str], environment: Mapping[str, str]
) -> tuple[str, ...]:
    keys = [(option, key) for key in given]
    keys += [(name, environment[name]) for name in variables if name in environment]
    if file is not None:
        lines = [line.strip() for line in Path(file).read_text().splitlines()]
        in_file = [(f"{option}_file {file}", line) for line in lines if line]
        if not in_file:
            raise ValueError(f"{option}_file {file} holds no key; write a key into each line")
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
        tenant = self._tenant(scope) if scope["type"] == "http" else None
        if tenant is not None:
            note_tenant(scope, tenant)
        if scope["type"] == "http" and tenant is None and not self._is_open(scope["path"]):
            error = ApiError(
                401,
                "the API key is missing or wrong; send the header `Authorization: Bearer KEY`, or `x-api-key: KEY`",
                type="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error.response(scope["path"])(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        return path in OPEN_PATHS or path in OPERATOR_PATHS or path.startswith(OPEN_FOLDERS)

    def _tenant(self, scope: Scope) -> int | None:
        """Return the number of the key that a request has; None if it has none of them."""
        key = given_key(scope)
        digest = hashlib.sha256(key).digest()
        # Every key is compared, so that the time does not tell which of them matches.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return matches.index(True) if key and any(matches) else None


def given_key(scope: Scope) -> bytes:
    """Return the key that a request has, empty if it has none: in `Authorization: Bearer KEY`, or in x-api-key.

    Clients of Anthropic's API send the latter.
    """
    headers: dict[bytes, bytes] = dict(scope["headers"])
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return key.strip()
    return b"" if scheme else headers.get(b"x-api-key", b"").strip()


class HostGuard:
    """Middleware that refuses requests which a web page of another site made a browser send.

    Without keys, any client that reaches the server may use it. A page can let its own name resolve to this machine's
    address (DNS rebinding); the Host header then has that name. Or it sends a request to another origin; the Origin
    header then has its own. Programs that are not browsers send no Origin. With keys, a page would have to know a key.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app = app
        self._is_open = not options.api_key
        self._names = {name.lower().rstrip(".") for name in (options.host, *options.allowed_hosts)}
        self._is_any_allowed = "*" in options.allowed_hosts
        self._serves_other_machines = options.host in _EVERY_ADDRESS
        if not _is_loopback(options.host):
            self._names.add(socket.gethostname().lower())
        self._origins = frozenset(options.cors_allow_origin)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await refusal.response()(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(hosts) > 1 or (not hosts and scope["http_version"] == "1.1"):
            return ApiError(400, f"the request has {len(hosts)} Host headers; send 1", code="invalid_host")
        if not self._is_open:
            return None
        if hosts and not self._is_allowed(name := host_name(hosts[0])):
            return ApiError(
                403,
                f"the Host header names {name!r:.100}, and this server has no API key: use localhost or the address of "
                "--host, start the server with --allowed-hosts NAME, or require a key with --api-key",
                code="host_not_allowed",
            )
        origins = [value.decode("latin-1") for name, value in scope["headers"] if name == b"origin"]
        if scope["method"] == "POST" and any(not self._is_own(origin, hosts) for origin in origins):
            return ApiError(
                403,
                f"the request comes from a web page of the origin {origins[0]!r:.100}; start the server with "
                "--cors-allow-origin ORIGIN to let it",
                code="origin_not_allowed",
            )
        return None

    def _is_allowed(self, name: str) -> bool:
        if self._is_any_allowed or name in self._names or name.endswith(".localhost") or _is_loopback(name):
            return True
        # An attacker's name cannot be an address.
        return self._serves_other_machines and _is_address(name)

    def _is_own(self, origin: str, hosts: list[str]) -> bool:
        return (
            "*" in self._origins
            or origin in self._origins
            or origin.partition("://")[2].lower() in map(str.lower, hosts)
        )


_EVERY_ADDRESS: Final = {"", "0.0.0.0", "::"}
"""Values of `--host` that mean all addresses of the machine."""


def host_name(header: str) -> str:
    """Return the name or the address in a Host header, in lower case, without its port."""
    name = header.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(name: str) -> bool:
    return name == "localhost" or (_is_address(name) and ipaddress.ip_address(name).is_loopback)


def guards(options: ServerOptions) -> list[Middleware]:
    """Return the middleware that guards an application, outermost first."""
    layers = [Middleware(HostGuard, options=options)]
    if options.cors_allow_origin:
        # Before the keys, because a browser's preflight request carries no key.
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=options.cors_allow_origin,
                allow_methods=("GET", "POST"),
                # OpenAI's client in a browser sends many headers of its own.
                allow_headers=("*",),
                # Chromium asks for a server in the local network whether pages of the internet may reach it.
                allow_private_network=True,
                expose_headers=("X-Request-Id", "Retry-After", "X-Should-Retry"),
            )
        )
    if options.api_key:
        layers.append(Middleware(RequireApiKey, keys=different_keys(options)))
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
