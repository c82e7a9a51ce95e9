"""The options of the HTTP server; each is also a flag of `vllm-mp serve`."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How the server listens, whom it serves, and its limits."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0 lets the system choose."""
    max_body_bytes: int = 32 * 2**20
    """Largest body of a request, in bytes; a larger body is refused with status 413."""
    body_timeout: float = 60.0
    """Longest time for the body of a request to arrive, in seconds; a slower one is refused with status 408."""
    request_timeout: float | None = None
    """Longest time for a response, in seconds; then the request is aborted, with status 504 if nothing was sent."""
