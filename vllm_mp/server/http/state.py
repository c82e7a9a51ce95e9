"""What all requests to a server share."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from vllm_mp.client.async_llm import AsyncLLM
from vllm_mp.requests.lora_request import LoRARequest
from vllm_mp.server.http.admission import Admission
from vllm_mp.server.http.body.ignored_fields import IgnoredFields
from vllm_mp.server.http.live_feed import LiveFeed
from vllm_mp.server.http.options import ServerOptions
from vllm_mp.server.http.shared_state import SharedState
from vllm_mp.server.http.tenants import Tenants


@dataclass
class ServerState:
    """The engine, the options, and the parts of the server that outlive a request."""

    engine: AsyncLLM
    options: ServerOptions
    admission: Admission
    shared: SharedState | None = None
    """What this process shares with other front processes; None: it is the only one."""
    tenants: Tenants = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))
    """When the server started, in seconds since 1970: the `created` of its models."""
    live_feed: LiveFeed = field(init=False)
    """What the page at `/` shows."""
    ignored_fields: IgnoredFields = field(init=False)
    """The fields of requests that are ignored."""
    adapters: dict[str, LoRARequest] = field(init=False)
    """The adapters that requests may name as their model, by name."""
    last_adapter_id: int = field(init=False, default=0)
    """The latest id that was given to an adapter which a request loads."""
    _adapter_locks: WeakValueDictionary[str, asyncio.Lock] = field(init=False, default_factory=WeakValueDictionary)
    live_ids: Counter[str] = field(default_factory=Counter)
    """The ids of the live requests to this server process, with the number of requests that have each."""

    _ping: "asyncio.Future[None] | None" = field(init=False, default=None)
    """The latest ping of the core."""

    def __post_init__(self) -> None:
        self.tenants = Tenants(self.options, None if self.shared is None else self.shared.secret)
        self.ignored_fields = IgnoredFields(self.engine.stats.cells)
        self.live_feed = LiveFeed(self.engine, self.admission, self.options.max_body_bytes)
        lora = self.engine.vllm_config.lora_config
        self.adapters = {} if lora is None else {module.lora_name: module for module in lora.lora_modules}

    def adapter_lock(self, name: str) -> asyncio.Lock:
        """Return the lock to hold while the adapter `name` is loaded or removed, however long that takes."""
        return self._adapter_locks.setdefault(name, asyncio.Lock())

    @contextlib.contextmanager
    def holding_id(self, request_id: str) -> Iterator[None]:
        """Count a request with the id `request_id` among the live ones for the length of the block."""
        self.live_ids[request_id] += 1
        try:
            yield
        finally:
            self.live_ids[request_id] -= 1
            if not self.live_ids[request_id]:
                del self.live_ids[request_id]

    async def ping_core(self) -> None:
        """Return once the core answers; callers at the same time share a ping, so that probes cannot flood the core.

        Raises EngineError if the core does not answer within the option `ready_timeout`.
        """
        if self._ping is None or self._ping.done():
            self._ping = asyncio.ensure_future(self.engine.ping(self.options.ready_timeout))
            # The caller may hang up: then the error has no other reader.
            self._ping.add_done_callback(lambda ping: ping.cancelled() or ping.exception())
        await asyncio.shield(self._ping)
