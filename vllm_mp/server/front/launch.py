"""How a front process is launched, and what its parent tells it: lines of JSON on its standard input.

The first line is a `FrontLaunch`. A later line is a `CoreGone` or an `AllGone`. The end of the input means that the
parent has died.
"""

from typing import Any

import msgspec

from vllm_mp.server.http.options import ServerOptions

READY_LINE = b"ready\n"
"""What a front process writes to standard output once it serves."""


class FrontLaunch(msgspec.Struct, kw_only=True):
    """What a front process needs to serve. It inherits the descriptors."""

    options: ServerOptions
    """With the API keys from all sources."""
    address: str
    """The addresses of the cores, separated by commas."""
    client_options: dict[str, Any]
    """Further arguments of `AsyncLLM.connect`. For a core of this server they name its tokenizer."""
    connect_timeout: float
    """Seconds that the core may take to load."""
    reconnect_timeout: float
    """Seconds that the next core may take after a death."""
    listener: int
    """Descriptor of the listening socket."""
    metrics_listener: int | None
    """Descriptor of the socket that has metrics and probes alone."""
    index: int
    """The number of this process among the front processes, from 0."""
    count: int
    """The number of front processes."""
    is_restart: bool
    """The server has been ready before: connections wait in the socket until this process serves."""
    memory: int
    """Descriptor of shared memory, as `SharedState` describes it."""
    metrics_folder: str
    """Folder in which the front processes share their statistics."""


class CoreGone(msgspec.Struct, tag=True):
    """One of several cores is gone for good: the others go on with its requests."""

    address: str
    cause: str
    is_from_outside: bool
    """Its last death was due to another process, and to no request."""


class AllGone(msgspec.Struct, tag=True):
    """All cores are gone for good: the front process fails its requests and ends."""

    cause: str
