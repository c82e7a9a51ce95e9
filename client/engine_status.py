"""What an engine tells of itself: its health, the state and load of its core, its configuration."""

import asyncio
import contextlib
import time
from typing import Any

from vllm_mp.client.completed_call import AwaitableInt
from vllm_mp.client.engine_lifecycle import EngineLifecycle
from vllm_mp.client.outputs.output_processor import OutputProcessor
from vllm_mp.client.stats import CoreReading
from vllm_mp.config import DecodingConfig, LoRAConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm_mp.errors import EngineError

_DRAIN_POLL_S = 0.01


class EngineStatus(EngineLifecycle):
    """The part of `AsyncLLM` that asks about the engine and changes nothing."""

    async def check_health(self) -> None:
        """Return if the core is well.

        Raises EngineDeadError if the core is gone for good or the background loop is stopped, and EngineError if the
        core does not answer in time: because it hangs, or because it died and its successor is not ready yet. Both are
        RuntimeErrors.
        """
        self._attach_to_loop()
        await self._core_client.check_health(self.vllm_config.liveness_config.engine_iteration_timeout_s)

    async def core_status(self) -> dict[str, Any]:
        """Return the core's incarnation, pid, restarts, requests, KV blocks, heartbeat age and standby.

        `restarts` counts those by the core's parent, for a shared core that of `vllm-mp engine`. `last_death` says why
        the predecessor died; None if there was none.
        """
        status: dict[str, Any] = await self._ask("status")
        page = self._supervisor.status()
        status |= self._known_status()
        status["heartbeat_age"] = page.heartbeat_age if page else None
        return status

    def last_core_status(self) -> dict[str, Any]:
        """Return what is known of the core without asking it, also while it is dead or hangs.

        `state` is its state on the status page, "RECOVERING" while there is no core, or "DEAD" once it is gone for
        good, and `reason` says why. The values from the status page are missing if the page is not visible, as over
        TCP.
        """
        self._check_process()
        status = self._known_status()
        if page := self._supervisor.status():
            names = ("pid", "step", "num_running", "num_waiting", "free_blocks", "total_blocks", "heartbeat_age")
            status |= {name: getattr(page, name) for name in names}
            status["state"] = page.state.name
        if self._supervisor.end is not None:
            status |= {"state": "DEAD", "reason": self._supervisor.end}
        elif (cause := self._core_client.recovers_from) is not None:
            status |= {"state": "RECOVERING", "reason": cause}
        return status

    def _known_status(self) -> dict[str, Any]:
        """Return what this client knows of the core's parent and of earlier cores."""
        return {
            "incarnation": self._core_client.incarnation,
            "restarts": self._supervisor.num_restarts,
            "last_death": self._supervisor.core.last_cause,
            "standby_pid": self._supervisor.standby_pid,
        }

    async def ping(self, timeout: float) -> None:
        """Return once the core answers.

        Raises EngineDeadError if the core is gone for good, and EngineError if it does not answer within `timeout`
        seconds, also because a step takes longer.
        """
        self._attach()
        await self._core_client.ping(timeout)

    async def read_core_load(self, timeout: float = 1.0) -> CoreReading | None:
        """Return the load of the core, over all its clients; None if it was never known.

        A core that does not answer within `timeout` seconds, because it is dead, hangs or computes a long step, is
        described by its status page if this process sees it, or else by its last answer. Raises no EngineError.
        """
        self._check_process()
        self._core_client.count_drops()
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
    def output_processor(self) -> OutputProcessor:
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
