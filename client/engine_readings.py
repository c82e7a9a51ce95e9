"""What is known of an engine: its counters, and the load of its core."""

import asyncio
import contextlib
import time
import weakref
from concurrent.futures import Future

from vllm_mp.client.engine.core_client import EngineCoreClient
from vllm_mp.client.outputs.output_processor import OutputProcessor
from vllm_mp.client.stats import CoreReading, EngineStats
from vllm_mp.config import VllmConfig
from vllm_mp.errors import EngineError

_LOAD_ON_PAGE = ("num_running", "num_waiting", "free_blocks", "total_blocks")
"""The fields of a `CoreReading` that the status page has too."""
_TIMEOUT_S = 1.0
"""Time that the core gets to say its load, and that must pass before it is asked again."""


class EngineReadings:
    """The counters of an engine and the load of its core, for readers in any thread. Keeps no engine alive."""

    def __init__(
        self, vllm_config: VllmConfig, stats: EngineStats, requests: OutputProcessor, core_client: EngineCoreClient
    ) -> None:
        self.vllm_config = vllm_config
        self.stats = stats
        self._requests = requests
        self._supervisor = core_client.supervisor
        self._core_client = weakref.ref(core_client)
        self._last_answer: CoreReading | None = None
        self._asked_at = 0.0

    @property
    def num_live_requests(self) -> int:
        """Number of requests whose streams have not ended."""
        return len(self._requests)

    def core_load(self) -> CoreReading | None:
        """Return the load of the core, over all its clients; None if it was never known.

        What the status page has, if it is visible, is of now; the rest is of the core's last answer.
        """
        last, page = self._last_answer, self._supervisor.status()
        if page is None:
            return last
        known = {} if last is None else last._asdict()
        return CoreReading.of(page.incarnation, known | {name: getattr(page, name) for name in _LOAD_ON_PAGE})

    async def ask_core(self, timeout: float) -> None:
        """Ask the core for its load; call this in the engine's event loop.

        An answer that does not come within `timeout` seconds is not waited for.
        """
        client = self._core_client()
        if client is not None:
            with contextlib.suppress(EngineError, TimeoutError):
                self._last_answer = CoreReading.of(client.incarnation, await client.call("status", timeout))

    def begin_to_ask_core(self) -> "Future[None] | None":
        """Ask the core for its load, unless it was asked in the last second; return what ends with the answer.

        Call this from any thread, and wait for the result only outside of event loops. None if the core is not asked,
        also because the engine's event loop does not run.
        """
        now, client = time.monotonic(), self._core_client()
        loop = client.loop if client is not None else None
        if loop is None or not loop.is_running() or now - self._asked_at < _TIMEOUT_S:
            return None
        self._asked_at = now
        asking = self.ask_core(_TIMEOUT_S)
        try:
            return asyncio.run_coroutine_threadsafe(asking, loop)
        except RuntimeError:  # the loop has just been closed
            asking.close()
            return None
