"""An operator who calls an engine at random moments, and processes beside its core that die."""

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable

import psutil

from vllm_mp import AsyncLLM, EngineError, LoRARequest
from vllm_mp.testing.faults.baseline import WAIT_S

_MOST_BETWEEN_S = 0.5
"""Longest time from one call to the next, and from a pause or a sleep to its end."""


class Operator:
    """Makes random calls of one engine, each in its own time, and kills processes that serve its core.

    Every call must end. It may be refused with an EngineError, because cores die meanwhile.
    """

    def __init__(self, engine: AsyncLLM, core_pid: Callable[[], int], spare: LoRARequest | None, seed: int) -> None:
        """`core_pid` returns the process id of the core; `spare` is an adapter that no request uses."""
        self.num_done: Counter[str] = Counter()
        """Calls that were carried out, by name."""
        self.refused: Counter[str] = Counter()
        """Calls that were refused, by name and reason."""
        self._engine = engine
        self._core_pid = core_pid
        self._spare = spare
        self._chance = random.Random(f"operator {seed}")
        self._calls: dict[str, Callable[[], Awaitable[object]]] = {
            "restart_core": engine.restart_core,
            "pause": self._pause,
            "sleep": self._sleep,
            "reset_prefix_cache": self._reset_prefix_cache,
            "collective_rpc": lambda: engine.collective_rpc("check_health"),
            "kill a helper": self._kill_helper,
        }
        if spare is not None:
            self._calls["add and remove an adapter"] = self._use_adapter

    async def run(self, is_over: Callable[[], bool]) -> None:
        """Make one call after another until `is_over`; raise TimeoutError if one does not end."""
        while not is_over():
            await self._wait()
            name = self._chance.choice(list(self._calls))
            try:
                async with asyncio.timeout(WAIT_S):
                    await self._calls[name]()
            except EngineError as error:
                self.refused[f"{name}: {type(error).__name__}: {error}"] += 1
            except TimeoutError:
                raise TimeoutError(f"{name} has not ended within {WAIT_S:g} s") from None
            else:
                self.num_done[name] += 1

    async def _wait(self) -> None:
        await asyncio.sleep(self._chance.uniform(0, _MOST_BETWEEN_S))

    async def _pause(self) -> None:
        mode = self._chance.choice(("keep", "wait"))
        try:
            await self._engine.pause_generation(mode, clear_cache=self._chance.random() < 0.5)
            await self._wait()
        finally:
            await self._until_carried_out(self._engine.resume_generation)
            assert not await self._engine.is_paused()

    async def _sleep(self) -> None:
        try:
            await self._engine.sleep(self._chance.choice((1, 2)), mode="keep")
            await self._wait()
        finally:
            await self._until_carried_out(self._engine.wake_up)
            assert not await self._engine.is_sleeping()

    async def _until_carried_out(self, call: Callable[[], Awaitable[object]]) -> None:
        """Repeat a call that was refused."""
        while True:
            try:
                await call()
                return
            except EngineError as error:
                self.refused[f"{call.__name__}: {type(error).__name__}: {error}"] += 1
            await self._wait()

    async def _reset_prefix_cache(self) -> None:
        await self._engine.reset_prefix_cache(reset_running_requests=self._chance.random() < 0.5)

    async def _use_adapter(self) -> None:
        assert self._spare is not None
        await self._engine.add_lora(self._spare)
        await self._wait()
        await self._engine.remove_lora(self._spare.lora_int_id)

    async def _kill_helper(self) -> None:
        """Kill a template, a standby, a rank, or any other process beside the core, if there is one."""
        core = self._core_pid()
        helpers = [child for child in psutil.Process().children(recursive=True) if child.pid != core]
        if helpers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._chance.choice(helpers).pid, signal.SIGKILL)
