"""The command `health`: whether the HTTP servers on this machine are healthy, for the health check of a container."""

import argparse
import http.client
import socket
import ssl
import sys
import urllib.error
import urllib.request

USAGE = "[URL...] [--ready]"

_TIMEOUT_S = 4.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "urls",
        metavar="URL",
        nargs="*",
        help="Ask the server at URL, or unix:PATH for a Unix socket. Default: all servers of this user on this "
        "machine, wherever they listen.",
    )
    parser.add_argument(
        "--ready", action="store_true", help="Ask whether they are ready to answer, not only alive. Default: off."
    )


def run(args: argparse.Namespace) -> int:
    """Ask each server; return 0 if all of them answer with 200, and 1 if one does not or there is none."""
    from vllm_mp.cli.running_engines import server_urls

    urls = args.urls or server_urls()
    if not urls:
        print("no server runs", file=sys.stderr)
        return 1
    path = "/ready" if args.ready else "/health"
    answers = {url: _answer(url, path) for url in urls}
    for url, answer in answers.items():
        print(f"{url}: {answer}")
    return 0 if all(answer == "200" for answer in answers.values()) else 1


def _answer(url: str, path: str) -> str:
    """Return the status with which the server answers at `path`, or why it does not."""
    # The certificate is that of a name, and the address may be another.
    context = ssl._create_unverified_context() if url.startswith("https") else None
    socket_path = url.removeprefix("https+").removeprefix("unix:")
    try:
        if url.endswith(f"unix:{socket_path}"):
            return _answer_at_path(socket_path, path, context)
        with urllib.request.urlopen(url.rstrip("/") + path, timeout=_TIMEOUT_S, context=context) as response:
            return str(response.status)
    except urllib.error.HTTPError as error:
        return str(error.code)
    except (OSError, ValueError, http.client.HTTPException) as error:
        return str(getattr(error, "reason", error))


def _answer_at_path(socket_path: str, path: str, context: ssl.SSLContext | None) -> str:
    """Return the status of the server on a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as plain:
        plain.settimeout(_TIMEOUT_S)
        plain.connect(socket_path)
        connection = http.client.HTTPConnection("localhost")
        connection.sock = plain if context is None else context.wrap_socket(plain)
        connection.request("GET", path)
        return str(connection.getresponse().status)
