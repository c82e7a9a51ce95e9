"""The baseline of a fault: a model, engine options, and requests with the outputs that an undisturbed engine gives."""

import asyncio
import contextlib
import random
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

from vllm_mp import AsyncEngineArgs, AsyncLLM
from vllm_mp.core_link.core_status import CoreStatus
from vllm_mp.testing.engines import ENGINE, running_engine, standalone_core
from vllm_mp.testing.faults.load import AnyCase, mixed_cases, outcomes_of

WAIT_S = 180.0
"""Limit for every wait of a scenario, far longer than needed, so that slow machines pass."""
_IMAGE_MODULE = "vllm_mp.client.images.image_process"
COMMON_OPTIONS: dict[str, Any] = {"max_logprobs": -1}
"""Engine options of every scenario."""


class Baseline:
    """A model, engine options, and requests whose undisturbed outcomes are known."""

    def __init__(
        self,
        model: str | Path,
        options: dict[str, Any] | None = None,
        *,
        streams: int = 16,
        max_tokens: int = 48,
        seed: int = 0,
        step: int | None = None,
        after: float | None = None,
        block_s: float = 30.0,
        pace_s: float = 0.0,
        make_cases: Callable[[int, int, int], list[AnyCase]] = mixed_cases,
    ) -> None:
        """Run the requests undisturbed.

        Faults strike at `step`, or `after` seconds, or else at a step that `seed` decides. `block_s` is how long a
        scenario blocks the client, in seconds. `pace_s` is added to the time of each step, so that the streams of a
        small model last until the fault. `make_cases` makes the requests, as `mixed_cases` does.
        """
        self.model = str(model)
        self.options = {**ENGINE, "check_invariants": False, **(options or {})}
        self.max_tokens = max_tokens
        self.cases = make_cases(streams, max_tokens, seed)
        self.block_s = block_s
        self.after = after
        self.shared: AsyncLLM | None = None
        self.pace = f"slow@step=*,seconds={pace_s:g}" if pace_s else ""
        """The injected fault that slows each step down."""
        self._seed, self._step = seed, step
        with self.engine() as engine:
            self.folder = engine.model_config.folder
            self.eos_token_ids = engine.model_config.eos_token_ids
            self.expected = asyncio.run(outcomes_of(engine, self.cases))

    def step_for(self, scenario: str) -> int:
        """Return the step at which the fault of `scenario` strikes, counted from the start of the streams."""
        if self._step is not None:
            return self._step
        return random.Random(f"{self._seed} {scenario}").randint(2, max(3, 2 * self.max_tokens // 3))

    def engine(self, **options: Any) -> contextlib.AbstractContextManager[AsyncLLM]:
        """Run an engine with a private core."""
        return running_engine(self.model, **{**self.options, **options})

    @contextlib.contextmanager
    def share_engine(self, faults: Iterable[str]) -> Iterator[AsyncLLM]:
        """Run an engine with all `faults` injected, for all scenarios that need no options of their own."""
        injected = ";".join([self.pace, *faults])
        with self.engine(fault_injection=injected, max_core_restarts=1000, **COMMON_OPTIONS) as self.shared:
            yield self.shared
        self.shared = None

    def core(
        self, address: str, *flags: str, **options: Any
    ) -> contextlib.AbstractContextManager["subprocess.Popen[str]"]:
        """Run a standalone core that listens at `address`, with `flags` that are no engine options."""
        flags += tuple(_flags(AsyncEngineArgs(model=self.model, **{**self.options, **options})))
        return standalone_core(self.model, address, *flags, stderr=subprocess.DEVNULL)


def _flags(args: AsyncEngineArgs) -> list[str]:
    """Return the command-line flags of all options that are not at their default."""
    flags = []
    for name, value in vars(args).items():
        if name == "model" or value == getattr(type(args), name, None) or value is None:
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return flags


def core_page(engine: AsyncLLM) -> CoreStatus | None:
    """Return the contents of the status page of the engine's core."""
    return engine.cores.first.supervisor.status()


def core_address(engine: AsyncLLM) -> str:
    """Return the address at which the engine's core listens."""
    return engine.cores.first.supervisor.core.connection.address


def core_children() -> set[int]:
    """Return the ids of this process's live child processes, except those that decode images."""
    found = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE and _IMAGE_MODULE not in child.cmdline():
                found.add(child.pid)
    return found
