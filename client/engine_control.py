"""The operations on an engine as a whole: health, pauses, sleep, profiling, its state and its configuration."""

import asyncio
import contextlib
import os
import time
import types
import weakref
from collections.abc import Sequence
from typing import Any, Self

from vllm_mp import wire
from vllm_mp.call_validation import check_pause, check_sleep, check_wake_up
from vllm_mp.client.engine.core_client import EngineCoreClient
from vllm_mp.client.engine.supervisor import CoreSupervisor
from vllm_mp.client.engine_end import EngineEnd
from vllm_mp.client.outputs.output_processor import OutputProcessor
from vllm_mp.client.stat_logger import StatLogger
from vllm_mp.client.stats import CoreReading, EngineStats
from vllm_mp.config import DecodingConfig, LoRAConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm_mp.errors import EngineDeadError, EngineError

_DRAIN_POLL_S = 0.01
_LOAD_ON_PAGE = ("num_running", "num_waiting", "free_blocks", "total_blocks")
"""The fields of a `CoreReading` that the status page has too."""

_engines: "weakref.WeakSet[EngineControl]" = weakref.WeakSet()
"""The engines of this process."""


class EngineControl:
    """The part of `AsyncLLM` that concerns no single request.

    Pauses, sleeps, profiles and `reset_prefix_cache` affect all clients of a shared core. They raise NotOperatorError,
    and change nothing, unless this client is an operator of the core (`operator_key_file` of `AsyncLLM.connect`).
    """

    def __init__(self, supervisor: CoreSupervisor, end: EngineEnd) -> None:
        self.vllm_config = supervisor.core.config
        self.model_config = self.vllm_config.model_config
        self._supervisor = supervisor
        self.stats = EngineStats(self.model_config.max_model_len, self.vllm_config.cache_config.enable_prefix_caching)
        """What this client counts; it needs no core to be read."""
        self._requests = OutputProcessor(self.stats.note_end)
        observability = self.vllm_config.observability_config
        self._stat_logger = StatLogger(observability, supervisor, self._requests, self.stats)
        self._core_client = EngineCoreClient(supervisor, self._requests, self.stats)
        self._accepts = True
        self._end = end
        self._is_shut_down = False
        self._owner = os.getpid()
        _engines.add(self)

    async def check_health(self) -> None:
        """Return if the core is well.

        Raises EngineDeadError if the core is gone for good, and EngineError if it does not answer in time: because it
        hangs, or because it died and its successor is not ready yet.
        """
        self._attach()
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
        with contextlib.suppress(EngineError, TimeoutError):
            self._attach()
            status = await self._core_client.call("status", timeout)
            self.stats.core = CoreReading.of(self._core_client.incarnation, status)
            return self.stats.core
        page = self._supervisor.status()
        if page is not None:
            known = {} if self.stats.core is None else self.stats.core._asdict()
            seen = {name: getattr(page, name) for name in _LOAD_ON_PAGE}
            self.stats.core = CoreReading.of(page.incarnation, known | seen)
        return self.stats.core

    async def reset_prefix_cache(self, device: Any = None) -> None:
        """Empty the prefix cache, so that later requests share nothing with earlier ones.

        `device` may name the device that holds the cache, as "cpu", "cuda" or vLLM's `Device.GPU`. Raises ValueError
        for another device, because there is no cache on it.
        """
        own = self.vllm_config.device_config.device
        if device is not None and _device_type(device) != own:
            raise ValueError(f"device must be None or {own!r}, where the KV cache is, got {device!r}")
        await self._ask("reset_prefix_cache")

    async def pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """Stop generation until `resume_generation`; requests that arrive meanwhile are accepted and wait.

        `mode` decides about live requests: "abort" ends them with finish_reason "abort", "wait" lets them finish and
        returns after the last, "keep" freezes them until generation is resumed. `clear_cache` ensures that no key or
        value from before the pause is used after it, as a change of weights requires: the prefix cache is emptied, and
        frozen requests are recomputed.

        The pause holds for every client of a shared core, even after this client has left. Pausing a paused engine
        applies the new mode to the requests that do not already wait for the end of the pause; "abort" ends these too.
        Cancelling the call does not undo the pause. Raises ValueError for an unknown mode, TypeError unless
        `clear_cache` is a bool, and EngineError if the engine is resumed, or paused with "keep", while this call waits.
        """
        check_pause(mode, clear_cache)
        if mode == "wait":
            await self._call("pause", mode, clear_cache)
        else:
            await self._ask("pause", mode, clear_cache)

    async def resume_generation(self) -> None:
        """End a pause, whichever client began it; no-op if the engine is not paused."""
        await self._ask("resume")

    async def is_paused(self) -> bool:
        """Return whether any client has called `pause_generation` and none has called `resume_generation` since."""
        return bool((await self.core_status())["is_paused"])

    async def start_profile(self) -> None:
        """Record the core's next steps, at most 256, with PyTorch's profiler.

        Raises EngineError if the profiler runs already.
        """
        await self._ask("start_profile")

    async def stop_profile(self) -> str:
        """Stop the profiler and write its trace, which Chrome and Perfetto display; return the trace's folder.

        The folder is on the core's machine: the value of VLLM_TORCH_PROFILER_DIR in the core's environment, or else a
        temporary folder that the caller must remove. The recording is lost if the core dies. Raises EngineError if
        `start_profile` has not been called.
        """
        folder: str = await self._ask("stop_profile")
        return folder

    async def sleep(self, level: int = 1, mode: str = "keep") -> None:
        """Release the memory of the KV cache and of the weights until `wake_up`.

        `level` 1 keeps the weights in host memory, which on a CPU changes nothing for them; 2 drops them, and `wake_up`
        loads them again. Returns when the memory is free. Live requests are held and continue after the wake-up as if
        nothing had happened, or with `mode` "abort" end with finish_reason "abort"; requests that arrive meanwhile are
        accepted and wait. The prefix cache is emptied.

        The sleep holds for every client of a shared core, even after this client has left, and beside a pause:
        generation continues only when both have ended. A core that already sleeps goes to the deeper of the two levels.
        Cancelling the call does not undo it. Raises ValueError for an unknown level or mode, and EngineError if the
        host has no room for the weights; then the engine continues.
        """
        check_sleep(level, mode)
        await self._call("sleep", level, mode)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """End a sleep, whichever client began it; no-op if the engine is awake.

        `tags` names what comes back: "weights", "kv_cache" or both; generation continues when both are back. Returns
        when that is done, which after level 2 takes as long as loading the model; the core answers nothing else
        meanwhile. Raises ValueError for other tags, and EngineError if there is no memory or the weights cannot be
        read: then the engine stays asleep, the memory that this call took is released, and the call may be repeated.
        """
        await self._call("wake_up", *check_wake_up(tags))

    async def is_sleeping(self) -> bool:
        """Return whether any client has called `sleep`, and not everything has been woken up since."""
        return bool((await self.core_status())["is_sleeping"])

    async def wait_for_requests_to_drain(self, timeout: float = 300) -> None:
        """Return when this client has no unfinished request and the core has released all its slots.

        Raises TimeoutError, which says how many are left, after `timeout` seconds.
        """
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

    async def do_log_stats(self) -> None:
        """Log a line about throughput and load now; without a call, there is a line every 10 seconds."""
        self._check_process()
        self._stat_logger.write()

    async def get_num_unfinished_requests(self) -> int:
        """Return the number of requests whose streams have not ended."""
        self._check_process()
        return len(self._requests)

    @property
    def is_running(self) -> bool:
        return self._accepts and not self.is_stopped

    @property
    def is_stopped(self) -> bool:
        return self._is_shut_down or self.errored

    @property
    def errored(self) -> bool:
        """The core is gone for good."""
        return self._supervisor.end is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the core is gone for good; None while it is not."""
        return self._core_client.dead_error

    def start_background_loop(self) -> None:
        """Accept requests, after `start_engine_loop=False`."""
        self._check_process()
        self._accepts = True

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

    def shutdown(self, timeout: float | None = None) -> None:
        """End the core, by force after `timeout` seconds, and remove its files; live streams fail. Idempotent.

        A shared core, as with `connect`, continues without this client's requests.
        """
        if self._begin_shutdown():
            self._end.run(timeout)
        else:
            self._end.wait()

    async def aclose(self, timeout: float | None = None) -> None:
        """Do what `shutdown` does, beside the event loop; a further call waits for the first.

        Cancelling the call does not undo it: the core ends all the same.
        """
        if self._begin_shutdown():
            self._end.begin(timeout)
        if not self.is_forked:
            await self._end.done()

    def shutdown_background_loop(self) -> None:
        """Call `shutdown`, of which this is the older name."""
        self.shutdown()

    async def __aenter__(self) -> Self:
        self._check_process()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        await self.aclose()

    @property
    def is_forked(self) -> bool:
        """This process was forked after the engine was made, and cannot use it."""
        return os.getpid() != self._owner

    def _check_process(self) -> None:
        """Raise RuntimeError if this process was forked after the engine was made."""
        if self.is_forked:
            raise self._fork_error()

    def _fork_error(self) -> RuntimeError:
        return RuntimeError(
            f"this engine belongs to process {self._owner}, and this process, {os.getpid()}, was forked from it later; "
            "make an engine after the fork (with gunicorn, leave --preload out)"
        )

    def _begin_shutdown(self) -> bool:
        """End all streams; return whether this is the first call, after which the core must be ended."""
        if self._is_shut_down or self.is_forked:
            return False
        self._is_shut_down = True
        self._core_client.fail_all(EngineDeadError("the engine was shut down"))
        return True

    def _attach(self) -> None:
        """Receive from the core on the running loop.

        Raises EngineDeadError if the core is gone for good, and RuntimeError in a forked child.
        """
        self._check_process()
        self._core_client.attach()
        if not self._accepts:
            raise EngineError("start_engine_loop was False: call start_background_loop() first")

    async def _call(self, name: str, *args: wire.CallArgument) -> Any:
        """Run an operation that may take any time; raises EngineError if the core answers with an error."""
        self._attach()
        return await self._core_client.call(name, None, *args)

    async def _ask(self, name: str, *args: wire.CallArgument) -> Any:
        """Run an operation that a core answers between two steps; raises EngineError also if it does not."""
        self._attach()
        limit = self.vllm_config.liveness_config.engine_iteration_timeout_s
        try:
            return await self._core_client.call(name, limit, *args)
        except TimeoutError as error:
            raise EngineError(f"the core has not answered for {limit:g} s: {self._supervisor.status()}") from error


def _fail_streams() -> None:
    """End the streams of all engines in a forked child, which has no thread and no socket that could go on with them.

    No consumer is woken, because the event loop in which it waits is the parent's.
    """
    for engine in list(_engines):
        for stream in engine._requests.streams():
            stream.error = engine._fork_error()


os.register_at_fork(after_in_child=_fail_streams)


def _device_type(device: Any) -> str:
    """Return the type of a device given as a string ("cuda:0"), an enum (vLLM's `Device.GPU`) or a `torch.device`."""
    name = str(getattr(device, "name", getattr(device, "type", device))).lower().partition(":")[0]
    return "cuda" if name == "gpu" else name
