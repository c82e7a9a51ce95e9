"""What an engine tells of itself: its health, the state and load of its core, its configuration."""

import asyncio
import contextlib
import time
from typing import Any

from vllm_mp.client.cores.core_client import EngineCoreClient
from vllm_mp.client.engine.lifecycle import EngineLifecycle
from vllm_mp.client.outputs.live_requests import LiveRequests
from vllm_mp.client.stats import CoreReading
from vllm_mp.client.threads.completed_call import AwaitableInt
from vllm_mp.config import DecodingConfig, LoRAConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm_mp.errors import EngineError

_DRAIN_POLL_S = 0.01
_STATUS_TIMEOUT_S = 2.0
"""Time that each of several cores gets to say its status; after that its status page says it."""
_SUMS = ("free_blocks", "num_preemptions", "num_running", "num_waiting", "restarts", "step", "total_blocks")
"""The numbers in the status of a core that are added up over several cores."""


class EngineStatus(EngineLifecycle):
    """The part of `AsyncLLM` that asks about the engine and changes nothing."""

    async def check_health(self) -> None:
        """Return if a core is well.

        Raises EngineDeadError if all cores are gone for good or the background loop is stopped, and EngineError if no
        core answers in time: because it hangs, or because it died and its successor is not ready yet. Both are
        RuntimeErrors.
        """
        self._attach_to_loop()
        await self._cores.check_health(self.vllm_config.liveness_config.engine_iteration_timeout_s)

    async def core_status(self) -> dict[str, Any]:
        """Return the core's incarnation, pid, restarts, requests, KV blocks, heartbeat age and standby.

        `restarts` counts those by the core's parent, for a shared core that of `vllm-mp engine`. `last_death` says why
        the predecessor died; None if there was none. A core on Ray also has `node`, with what is reserved there.

        With several cores, numbers of requests, blocks, steps and restarts are sums, the rest is the first core's, and
        `cores` has the status of each core with its `rank` and `state`; that of a core without an answer is what
        `last_core_status` knows. Raises EngineError if no core answers.
        """
        clients = self._cores.clients
        if len(clients) == 1:
            (status,) = await self._ask("status")
            return self._with_page(status, clients[0])
        self._attach()
        serving = [client for client in clients if client.has_core]
        answers = await asyncio.gather(
            *(client.call("status", _STATUS_TIMEOUT_S) for client in serving), return_exceptions=True
        )
        said = {client: answer for client, answer in zip(serving, answers, strict=True) if isinstance(answer, dict)}
        if not said:
            raise EngineError(f"no core has answered for {_STATUS_TIMEOUT_S:g} s; try again later")
        return _together(
            [
                {"state": "SERVING"} | self._last_status(client) | self._with_page(said.get(client, {}), client)
                for client in clients
            ]
        )

    def last_core_status(self) -> dict[str, Any]:
        """Return what is known of the core without asking it, also while it is dead or hangs.

        `state` is its state on the status page, "RECOVERING" while there is no core, or "DEAD" once it is gone for
        good, and `reason` says why. The values from the status page are missing if the page is not visible, as over
        TCP.
        """
        self._check_process()
        clients = self._cores.clients
        if len(clients) == 1:
            status = self._last_status(clients[0])
            del status["rank"]
            return status
        status = _together([self._last_status(client) for client in clients])
        if (error := self.dead_error) is not None:
            status |= {"state": "DEAD", "reason": str(error)}
        elif (cause := self._cores.recovers_from) is not None:
            status |= {"state": "RECOVERING", "reason": cause}
        return status

    def _last_status(self, client: EngineCoreClient) -> dict[str, Any]:
        """Return what is known of a core without asking it."""
        status = {"rank": client.rank} | self._known_status(client)
        if page := client.supervisor.status():
            names = ("pid", "step", "num_running", "num_waiting", "free_blocks", "total_blocks", "heartbeat_age")
            status |= {name: getattr(page, name) for name in names}
            status["state"] = page.state.name
        if client.supervisor.end is not None:
            status |= {"state": "DEAD", "reason": client.supervisor.end}
        elif (cause := client.recovers_from) is not None:
            status |= {"state": "RECOVERING", "reason": cause}
        elif self._cores.is_draining(client.rank):
            status["state"] = "DRAINING"
        return status

    def _with_page(self, status: dict[str, Any], client: EngineCoreClient) -> dict[str, Any]:
        """Return a core's answer with what this client knows beside it."""
        page = client.supervisor.status()
        return status | self._known_status(client) | {"heartbeat_age": page.heartbeat_age if page else None}

    def _known_status(self, client: EngineCoreClient) -> dict[str, Any]:
        """Return what this client knows of a core's parent and of earlier cores."""
        return {
            "incarnation": client.incarnation,
            "restarts": client.supervisor.num_restarts,
            "last_death": client.supervisor.core.last_cause,
            "standby_pid": client.supervisor.standby_pid,
        } | ({} if client.supervisor.node is None else {"node": client.supervisor.node})

    async def ping(self, timeout: float) -> None:
        """Return once a core answers.

        Raises EngineDeadError if all cores are gone for good, and EngineError if none answers within `timeout` seconds,
        also because a step takes longer.
        """
        self._attach()
        await self._cores.ping(timeout)

    async def read_core_load(self, timeout: float = 1.0) -> CoreReading | None:
        """Return the load of all cores together, over all their clients; None if it was never known.

        A core that does not answer within `timeout` seconds, because it is dead, hangs or computes a long step, is
        described by its status page if this process sees it, or else by its last answer. Raises no EngineError.
        """
        self._check_process()
        self._cores.count_drops()
        with contextlib.suppress(EngineError):
            self._attach()
            await self.readings.ask_core(timeout)
        return self.readings.core_load()

    async def is_paused(self) -> bool:
        """Return whether any client has called `pause_generation` and none has called `resume_generation` since."""
        return bool((await self.core_status())["is_paused"])

    async def is_sleeping(self) -> bool:
        """Return whether any client has called `sleep`, and not everything has been woken up since."""
        return bool((await self.core_status())["is_sleeping"])

    async def wait_for_requests_to_drain(self, timeout: float = 300, *, drain_timeout: float | None = None) -> None:
        """Return when this client has no unfinished request and the core has released all its slots.

        Raises TimeoutError, which says how many are left, after `timeout` seconds; `drain_timeout`, vLLM's name of it,
        takes precedence.
        """
        timeout = timeout if drain_timeout is None else drain_timeout
        self._attach()
        deadline = time.monotonic() + timeout
        # Polled, so that the code that handles every token need not announce it.
        while len(self._requests) or self._requests.num_slots_in_use:
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"after {timeout:g} s {len(self._requests)} requests have not ended, and the core has "
                    f"{self._requests.num_slots_in_use} to release; wait longer, or abort them"
                )
            await asyncio.sleep(_DRAIN_POLL_S)
            self._attach()

    def get_num_unfinished_requests(self) -> AwaitableInt:
        """Return the number of requests whose streams have not ended; `await` is optional."""
        self._check_process()
        return AwaitableInt(len(self._requests))

    @property
    def output_processor(self) -> LiveRequests:
        """The live requests, which callers of vLLM ask `has_unfinished_requests()`."""
        return self._requests

    async def is_tracing_enabled(self) -> bool:
        """Return whether spans of requests are sent to a collector."""
        self._check_process()
        return self.is_tracing

    @property
    def is_tracing(self) -> bool:
        """What `is_tracing_enabled` returns."""
        return self._tracer is not None

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """Return what requests may ask of the model: "generate", "embed", "classify" and "score", as far as it can."""
        self._check_process()
        return tuple(self.model_config.supported_tasks)

    async def get_vllm_config(self) -> VllmConfig:
        return self.vllm_config

    async def get_model_config(self) -> ModelConfig:
        return self.vllm_config.model_config

    async def get_parallel_config(self) -> ParallelConfig:
        return self.vllm_config.parallel_config

    async def get_scheduler_config(self) -> SchedulerConfig:
        return self.vllm_config.scheduler_config

    async def get_lora_config(self) -> LoRAConfig | None:
        return self.vllm_config.lora_config

    async def get_decoding_config(self) -> DecodingConfig:
        return self.vllm_config.decoding_config


def _together(cores: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the status of several cores as one."""
    first = next((core for core in cores if core.get("state") not in ("DEAD", "RECOVERING")), cores[0])
    status = {name: value for name, value in first.items() if name != "rank"}
    for name in _SUMS:
        if name in first:
            status[name] = sum(core.get(name, 0) for core in cores)
    for name in ("is_paused", "is_sleeping"):
        if name in first:
            status[name] = any(core.get(name) for core in cores)
    status["cores"] = cores
    return status
