"""The operations that change an engine for all its clients: pauses, sleep, the prefix cache, calls of workers."""

import asyncio
import reprlib
from collections.abc import Sequence
from typing import Any

from vllm_mp.arguments.unserved_arguments import check_unserved
from vllm_mp.arguments.worker_arguments import pack_arguments
from vllm_mp.client.engine.engine import Engine
from vllm_mp.errors import EngineError
from vllm_mp.validation.call_validation import check_pause, check_sleep, check_timeout, check_wake_up


class EngineControl:
    """Changes the cores of an engine for all their clients. Its calls are those of `AsyncLLM`, which documents them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def reset_prefix_cache(self, device: Any, *, reset_running_requests: bool, reset_connector: bool) -> None:
        """Empty the prefix cache; see `AsyncLLM.reset_prefix_cache`."""
        check_unserved(reset_connector=reset_connector)
        own = self._engine.vllm_config.device_config.device
        if device is not None and _device_type(device) != own:
            raise ValueError(f"device must be None or {own!r}, where the KV cache is, got {device!r}")
        await self._engine.ask("reset_prefix_cache", *([True] if reset_running_requests else []))

    async def reset_mm_cache(self) -> None:
        """Forget images; see `AsyncLLM.reset_mm_cache`."""
        if self._engine.vllm_config.images is None:
            self._engine.attach()
            return
        self._engine.images.forget()
        for client in self._engine.cores.clients:
            client.forget_images()
        await self._engine.ask("reset_mm_cache")

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
    ) -> list[Any]:
        """Run a method of every worker; see `AsyncLLM.collective_rpc`."""
        if not isinstance(method, str):
            raise TypeError(
                f"method must be the name of a worker's method, got {method!r}: no code is sent to the core"
            )
        check_timeout(timeout)
        arguments = pack_arguments(args, kwargs)
        if timeout is None:
            results = await self._engine.ask("collective_rpc", method, arguments)
        else:
            self._engine.attach()
            try:
                results = await self._engine.cores.call("collective_rpc", timeout, method, arguments)
            except TimeoutError as error:
                raise TimeoutError(
                    f"collective_rpc({reprlib.repr(method)}) has not ended within timeout={timeout:g} s; raise timeout"
                ) from error
        if self._engine.vllm_config.parallel_config.world_size == 1:
            return results
        return [result for of_core in results for result in of_core]

    async def pause(self, mode: str, clear_cache: bool) -> None:
        """Stop generation; see `AsyncLLM.pause_generation`."""
        check_pause(mode, clear_cache)
        if mode == "wait":
            await self._engine.call("pause", mode, clear_cache)
        else:
            await self._engine.ask("pause", mode, clear_cache)
        await self._engine.requests.wake_ups.turn()  # after the consumers of the last tokens

    async def sleep(self, level: int, mode: str) -> None:
        """Release memory until `wake_up`; see `AsyncLLM.sleep`."""
        check_sleep(level, mode)
        has_several = len(self._engine.cores.clients) > 1
        slept = has_several and any(status["is_sleeping"] for status in await self._engine.ask("status"))
        try:
            await self._engine.call("sleep", level, mode)
        except EngineError:
            if has_several and not slept:
                await self._engine.call("wake_up", *check_wake_up(None))  # those cores that could fall asleep
            raise
        self._engine.stat_loggers.note_sleep(1, level)

    async def wake_up(self, tags: Sequence[str] | None) -> bool:
        """End a sleep; see `AsyncLLM.wake_up`."""
        await self._engine.call("wake_up", *check_wake_up(tags))
        if any(status["is_sleeping"] for status in await self._engine.ask("status")):
            return False
        self._engine.stat_loggers.note_sleep(0, 0)
        return True

    async def restart_cores(self) -> None:
        """Replace each core by a new process; see `AsyncLLM.restart_core`."""
        self._engine.attach()
        for client in self._engine.cores.clients:
            await asyncio.shield(asyncio.wrap_future(client.supervisor.replace_core()))


def _device_type(device: Any) -> str:
    """Return the type of a device given as a string ("cuda:0"), an enum (vLLM's `Device.GPU`) or a `torch.device`."""
    name = str(getattr(device, "name", getattr(device, "type", device))).lower().partition(":")[0]
    return "cuda" if name == "gpu" else name
