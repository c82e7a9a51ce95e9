"""Disturb a shared core under well-behaved clients and a hostile client: the well-behaved ones get every token."""

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from vllm_mp import AsyncLLM
from vllm_mp.testing.engines import eventually, free_tcp_address, make_keys
from vllm_mp.testing.faults.baseline import WAIT_S, Baseline
from vllm_mp.testing.faults.comparison import Comparison
from vllm_mp.testing.faults.leaks import nothing_left_behind
from vllm_mp.testing.faults.soak import Disturbance, SoakResult

_NUM_CLIENTS = 2
"""Well-behaved clients, beside the hostile one."""
_OPTIONS = {"max_core_restarts": 10**6, "engine_iteration_timeout_s": 10.0}
_DISTURBANCES = ("kill the core", "kill the core", "stop the core", "kill the hostile client")


class SharedSoak(Disturbance):
    """Keeps streams of well-behaved clients running on a shared core, which it disturbs."""

    def __init__(
        self, baseline: Baseline, clients: list[AsyncLLM], hostile: "HostileClient", folder: Path, seed: int
    ) -> None:
        """`folder` holds the core's socket."""
        super().__init__(baseline, clients, folder, seed)
        self._hostile = hostile
        self._known_restarts = 0

    async def _disturb(self) -> None:
        await self._outputs(self._chance.randint(1, 4 * len(self._baseline.cases)))
        disturbance = self._chance.choice(_DISTURBANCES)
        if disturbance == "kill the hostile client":
            self._hostile.start_again()
            return
        status = await self._core_status()
        if status["restarts"] > self._known_restarts:
            self.result.other_deaths.append(status["last_death"])
        self._watch.strike()
        with contextlib.suppress(ProcessLookupError):  # another death came first
            os.kill(status["pid"], signal.SIGKILL if disturbance == "kill the core" else signal.SIGSTOP)
        self.result.kills += 1

        async def is_replaced() -> bool:
            return all(client.last_core_status()["incarnation"] > status["incarnation"] for client in self._clients)

        await eventually(is_replaced, WAIT_S)
        await self._outputs(1)
        successor = await self._core_status()
        if f"process {status['pid']} " not in successor["last_death"]:
            self.result.other_deaths.append(successor["last_death"])
        self._known_restarts = successor["restarts"]
        self._note_recovery(successor["pid"])


class _Place(NamedTuple):
    """Where a shared core listens, with the keys that tcp needs."""

    address: str
    server_key: str | None = None
    client_keys: Sequence[str | None] = (None,) * (_NUM_CLIENTS + 1)
    """Key files; the last one is the hostile client's."""

    @classmethod
    def on_tcp(cls, folder: Path) -> "_Place":
        """Return a free address with keys for all clients, made in `folder`."""
        server, *clients = make_keys(folder, [f"client-{number}" for number in range(_NUM_CLIENTS + 1)])
        return cls(free_tcp_address(), server, clients)


class HostileClient:
    """The process of a hostile client."""

    def __init__(self, place: _Place, seed: int) -> None:
        module = "vllm_mp.testing.faults.hostile_client"
        self._command = [sys.executable, "-m", module, place.address, place.client_keys[-1] or ""]
        self._seeds = itertools.count(seed)
        self._process = self._start()

    def start_again(self) -> None:
        """Kill the process in the middle of what it does, and start another."""
        self.kill()
        self._process = self._start()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _start(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen([*self._command, str(next(self._seeds))], stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def _shared(baseline: Baseline, place: _Place, seed: int) -> Iterator[tuple[list[AsyncLLM], HostileClient]]:
    """Run a shared core with its clients."""
    keys = () if place.server_key is None else ("--key-file", place.server_key)
    with baseline.core(place.address, *keys, **_OPTIONS), contextlib.ExitStack() as stack:
        clients = []
        for key_file in place.client_keys[:_NUM_CLIENTS]:
            client = AsyncLLM.connect(place.address, key_file=key_file, timeout=WAIT_S)
            stack.callback(client.shutdown)
            clients.append(client)
        hostile = HostileClient(place, seed)
        stack.callback(hostile.kill)
        yield clients, hostile


def run_shared_soak(
    baseline: Baseline,
    *,
    kills: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    over_tcp: bool = False,
    show: Callable[[SoakResult], None] | None = None,
) -> SoakResult:
    """Kill and stop a shared core `kills` times, or for `seconds`, and return how its well-behaved clients fared."""
    began = time.monotonic()
    problems: list[str] = []

    def run(folder: Path) -> tuple[SoakResult, Comparison]:
        place = _Place.on_tcp(folder) if over_tcp else _Place(f"ipc://{folder}/core.sock")
        with _shared(baseline, place, seed) as (clients, hostile):
            soak = SharedSoak(baseline, clients, hostile, folder, seed)
            asyncio.run(soak.run(kills, seconds, show))
        return soak.result, soak.comparison

    with nothing_left_behind(problems), tempfile.TemporaryDirectory() as folder:
        result, comparison = run(Path(folder))  # nothing here holds the clients
    result.settle(comparison, baseline, problems, began)
    return result
