"""The operations that change an engine for all its clients: pauses, sleep, the profiler, the prefix cache."""

from collections.abc import Sequence
from typing import Any

from vllm_mp.arguments.unserved_arguments import check_unserved
from vllm_mp.arguments.worker_arguments import pack_arguments
from vllm_mp.client.engine.lifecycle import EngineLifecycle
from vllm_mp.errors import EngineError
from vllm_mp.validation.call_validation import check_pause, check_sleep, check_wake_up


class EngineControl(EngineLifecycle):
    """The part of `AsyncLLM` that changes the core for all its clients.

    Its operations raise NotOperatorError, and change nothing, unless this client is an operator of a shared core
    (`operator_key_file` of `AsyncLLM.connect`).
    """

    async def reset_prefix_cache(
        self, device: Any = None, *, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Empty the prefix cache, so that later requests share nothing with earlier ones; return True.

        `device` may name the device that holds the cache, as "cpu", "cuda" or vLLM's `Device.GPU`; a bool in its place
        is `reset_running_requests`. Raises ValueError for another device, because there is no cache on it, and
        NotImplementedError for `reset_running_requests` and `reset_connector`.
        """
        if isinstance(device, bool):
            device, reset_running_requests = None, device
        check_unserved(reset_running_requests=reset_running_requests, reset_connector=reset_connector)
        own = self.vllm_config.device_config.device
        if device is not None and _device_type(device) != own:
            raise ValueError(f"device must be None or {own!r}, where the KV cache is, got {device!r}")
        await self._ask("reset_prefix_cache")
        return True

    async def reset_mm_cache(self) -> None:
        """Return at once: this version serves no images or sounds, so there is no cache of them."""
        self._attach()

    async def reset_encoder_cache(self) -> None:
        """Return at once, as `reset_mm_cache` does."""
        self._attach()

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Run a method of every worker, named by `method`, and return their results: one for each core and rank.

        The methods are `check_health()`, `get_cache_block_size_bytes()`, `get_kv_cache_bytes(num_tokens)`,
        `get_memory_info()`, `get_model_info()`, `get_num_parameters()` and `get_supported_tasks()`. Arguments and
        results are plain data; no code travels.

        Raises TypeError for arguments that are no plain data and for a function as `method`, EngineError with the
        reason if the core refuses the call or the method fails, and TimeoutError after `timeout` seconds, by default
        EngineError after `engine_iteration_timeout_s`.
        """
        if not isinstance(method, str):
            raise TypeError(
                f"method must be the name of a worker's method, got {method!r}: no code is sent to the core"
            )
        arguments = pack_arguments(args, kwargs)
        if timeout is None:
            results = await self._ask("collective_rpc", method, arguments)
        else:
            self._attach()
            results = await self._cores.call("collective_rpc", timeout, method, arguments)
        if self.vllm_config.parallel_config.world_size == 1:
            return results
        return [result for of_core in results for result in of_core]

    async def pause_generation(
        self, mode: str = "abort", clear_cache: bool = True, *, wait_for_inflight_requests: bool | None = None
    ) -> None:
        """Stop generation until `resume_generation`; requests that arrive meanwhile are accepted and wait.

        `mode` decides about live requests: "abort" ends them with finish_reason "abort", "wait" lets them finish and
        returns after the last, "keep" freezes them until generation is resumed. `clear_cache` ensures that no key or
        value from before the pause is used after it, as a change of weights requires: the prefix cache is emptied, and
        frozen requests are recomputed. `wait_for_inflight_requests=True` is the older form of mode "wait".

        The pause holds for every client of a shared core, even after this client has left. Pausing a paused engine
        applies the new mode to the requests that do not already wait for the end of the pause; "abort" ends these too.
        Cancelling the call does not undo the pause. Raises ValueError for an unknown mode, TypeError unless
        `clear_cache` is a bool, and EngineError if the engine is resumed, or paused with "keep", while this call waits.
        """
        if wait_for_inflight_requests:
            mode = "wait"
        check_pause(mode, clear_cache)
        if mode == "wait":
            await self._call("pause", mode, clear_cache)
        else:
            await self._ask("pause", mode, clear_cache)

    async def resume_generation(self) -> None:
        """End a pause, whichever client began it; no-op if the engine is not paused."""
        await self._ask("resume")

    async def start_profile(self) -> None:
        """Record the core's next steps, at most 256, with PyTorch's profiler.

        Raises EngineError if the profiler runs already.
        """
        await self._ask("start_profile")

    async def stop_profile(self) -> str:
        """Stop the profiler and write its trace, which Chrome and Perfetto display; return the trace's folder.

        With several cores, the folders are separated by commas.

        The folder is on the core's machine: the value of VLLM_TORCH_PROFILER_DIR in the core's environment, or else a
        temporary folder that the caller must remove. The recording is lost if the core dies. Raises EngineError if
        `start_profile` has not been called.
        """
        return ", ".join(dict.fromkeys(await self._ask("stop_profile")))

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
        has_several = len(self._cores.clients) > 1
        slept = has_several and any(status["is_sleeping"] for status in await self._ask("status"))
        try:
            await self._call("sleep", level, mode)
        except EngineError:
            if has_several and not slept:
                await self._call("wake_up", *check_wake_up(None))  # those cores that could fall asleep
            raise
        self._stat_loggers.note_sleep(1, level)

    async def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """End a sleep, whichever client began it, and return whether the engine is awake; no-op if it was.

        `tags` names what comes back: "weights", "kv_cache" or both; generation continues when both are back. Returns
        when that is done, which after level 2 takes as long as loading the model; the core answers nothing else
        meanwhile. Raises ValueError for other tags, and EngineError if there is no memory or the weights cannot be
        read: then the engine stays asleep, the memory that this call took is released, and the call may be repeated.
        """
        await self._call("wake_up", *check_wake_up(tags))
        if any(status["is_sleeping"] for status in await self._ask("status")):
            return False
        self._stat_loggers.note_sleep(0, 0)
        return True


def _device_type(device: Any) -> str:
    """Return the type of a device given as a string ("cuda:0"), an enum (vLLM's `Device.GPU`) or a `torch.device`."""
    name = str(getattr(device, "name", getattr(device, "type", device))).lower().partition(":")[0]
    return "cuda" if name == "gpu" else name
