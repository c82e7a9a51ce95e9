"""What the operator reads on standard output."""

import contextlib
import json
import shlex

from vllm_mp.server.http.options import ServerOptions


def say(line: str) -> None:
    """Print a line for the operator. A closed standard output must not end a server."""
    with contextlib.suppress(OSError):
        print(line, flush=True)


def finishing(num_requests: int) -> str:
    """Return the words that say that these requests are finished first."""
    return f"finishing {num_requests} request{'' if num_requests == 1 else 's'}"


def drain_line(num_live: int, options: ServerOptions) -> str:
    """Return what the operator is told when a drain begins."""
    if not num_live:
        return "shutting down"
    return f"shutting down: {finishing(num_live)}, for up to {options.drain_timeout:g} s; Ctrl-C again stops now"


def ready_line(name: str, options: ServerOptions, url: str) -> str:
    """Return what the operator is told when the server is ready: the URL and a request to try."""
    body = shlex.quote(json.dumps({"prompt": "The capital of France is", "max_tokens": 16}))
    address = url
    if url.startswith("unix:"):
        scheme = "http" if options.ssl_certfile is None else "https"
        address = f"--unix-socket {shlex.quote(url.removeprefix('unix:'))} {scheme}://localhost"
    key = ' -H "Authorization: Bearer $VLLM_API_KEY"' if options.api_key else ""
    return (
        f"ready: {url} serves {name}; try: curl {address}/v1/completions -H 'Content-Type: application/json'{key} "
        f"-d {body}"
    )
