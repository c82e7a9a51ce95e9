"""What is known of an engine: its counters, and the load of its cores."""

import asyncio
import contextlib
import time
import weakref
from concurrent.futures import Future
from typing import TYPE_CHECKING

from vllm_mp.client.cores.core_client import EngineCoreClient
from vllm_mp.client.outputs.live_requests import LiveRequests
from vllm_mp.client.stats import CoreReading, EngineStats
from vllm_mp.config import VllmConfig
from vllm_mp.errors import EngineError

if TYPE_CHECKING:
    from vllm_mp.client.cores.core_group import CoreGroup

_LOAD_ON_PAGE = ("num_running", "num_waiting", "free_blocks", "total_blocks")
"""The fields of a `CoreReading` that the status page has too."""
_TIMEOUT_S = 1.0
"""Time that the cores get to say their load, and that must pass before they are asked again."""


class EngineReadings:
    """The counters of an engine and the load of its cores, for readers in any thread. Keeps no engine alive."""

    def __init__(self, vllm_config: VllmConfig, stats: EngineStats, requests: LiveRequests, cores: "CoreGroup") -> None:
        self.vllm_config = vllm_config
        self.stats = stats
        self._requests = requests
        self._cores = weakref.ref(cores)
        self._last_answers: dict[int, CoreReading] = {}
        """By the rank of the core."""
        self._last_loads: dict[int, CoreReading | None] = {0: None}
        """What `core_loads` has returned last."""
        self._asked_at = 0.0

    @property
    def num_live_requests(self) -> int:
        """Number of requests whose streams have not ended."""
        return len(self._requests)

    def core_loads(self) -> dict[int, CoreReading | None]:
        """Return the load of each core by its rank, over all its clients; None if it was never known.

        What the status page has, if it is visible, is of now; the rest is of the core's last answer.
        """
        if (cores := self._cores()) is not None:
            self._last_loads = {client.rank: self._load_of(client) for client in cores.clients}
        return self._last_loads

    def core_load(self) -> CoreReading | None:
        """Return the load of all cores together; None if none was ever known."""
        return CoreReading.total([load for load in self.core_loads().values() if load is not None])

    async def ask_core(self, timeout: float) -> None:
        """Ask the cores for their load; call this in the engine's event loop.

        Answers that do not come within `timeout` seconds are not waited for.
        """
        if (cores := self._cores()) is not None:
            await asyncio.gather(*(self._ask(client, timeout) for client in cores.clients if client.has_core))

    def begin_to_ask_core(self) -> "Future[None] | None":
        """Ask the cores for their load, unless they were asked in the last second; return what ends with the answers.

        Call this from any thread, and wait for the result only outside of event loops. None if no core is asked, also
        because the engine's event loop does not run.
        """
        now, cores = time.monotonic(), self._cores()
        loop = cores.loop if cores is not None else None
        if loop is None or not loop.is_running() or now - self._asked_at < _TIMEOUT_S:
            return None
        self._asked_at = now
        asking = self.ask_core(_TIMEOUT_S)
        try:
            return asyncio.run_coroutine_threadsafe(asking, loop)
        except RuntimeError:  # the loop has just been closed
            asking.close()
            return None

    async def _ask(self, client: EngineCoreClient, timeout: float) -> None:
        with contextlib.suppress(EngineError, TimeoutError):
            status = await client.call("status", timeout)
            self._last_answers[client.rank] = CoreReading.of(client.incarnation, status)

    def _load_of(self, client: EngineCoreClient) -> CoreReading | None:
        last, page = self._last_answers.get(client.rank), client.supervisor.status()
        if page is None:
            return last
        known = {} if last is None else last._asdict()
        return CoreReading.of(page.incarnation, known | {name: getattr(page, name) for name in _LOAD_ON_PAGE})
