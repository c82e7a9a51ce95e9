"""What all requests to a server share."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_mp.client.async_llm import AsyncLLM
from vllm_mp.server.options import ServerOptions


@dataclass
class ServerState:
    """The engine, the options, and the parts of the server that outlive a request."""

    engine: AsyncLLM
    options: ServerOptions
    created: int = field(default_factory=lambda: int(time.time()))
    """When the server started, in seconds since 1970: the `created` of its models."""
    admit: Callable[[int], contextlib.AbstractAsyncContextManager[None]] = lambda num_prompts: contextlib.nullcontext()
    """Returns a context that a request with that many prompts holds from before its tokenization until its end; its
    entry waits, or raises ApiError if the server has no room."""
