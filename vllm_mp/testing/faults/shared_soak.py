"""Disturb a shared core under well-behaved clients and a hostile client: the well-behaved ones get every token."""

import asyncio
import contextlib
import dataclasses
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from vllm_mp import AsyncLLM
from vllm_mp.authorized_clients import AuthorizedClients
from vllm_mp.curve_keys import make_client_key, make_server_key
from vllm_mp.testing.differential import Case
from vllm_mp.testing.engines import eventually
from vllm_mp.testing.faults.baseline import WAIT_S, Baseline
from vllm_mp.testing.faults.comparison import Comparison
from vllm_mp.testing.faults.leaks import nothing_left_behind
from vllm_mp.testing.faults.load import PauseWatch, WatchedEngine, outcome_of
from vllm_mp.testing.faults.soak import Sample, SoakResult

_NUM_CLIENTS = 2
"""Well-behaved clients, beside the hostile one."""
_OPTIONS = {"max_core_restarts": 10**6, "engine_iteration_timeout_s": 5.0}
_DISTURBANCES = ("kill the core", "kill the core", "stop the core", "kill the hostile client")


class SharedSoak:
    """Keeps streams of well-behaved clients running on a shared core, which it disturbs."""

    def __init__(
        self, baseline: Baseline, clients: list[AsyncLLM], hostile: "HostileClient", folder: Path, seed: int
    ) -> None:
        """`folder` holds the core's socket."""
        self.result = SoakResult()
        self.comparison = Comparison()
        self._baseline = baseline
        self._watch = PauseWatch()
        self._clients = [WatchedEngine(client, self._watch) for client in clients]
        self._hostile = hostile
        self._folder = folder
        self._chance = random.Random(seed)
        self._is_over = False

    async def run(self, kills: int | None, seconds: float | None, show: Callable[[SoakResult], None] | None) -> None:
        """Disturb until the number of `kills` or `seconds` is reached. Call `show` after each recovery."""
        streams = range(len(self._baseline.cases))
        workers = [asyncio.create_task(self._stream(client, i)) for client in self._clients for i in streams]
        deadline = None if seconds is None else time.monotonic() + seconds
        try:
            while (kills is None or self.result.kills < kills) and (deadline is None or time.monotonic() < deadline):
                await self._disturb()
                if show is not None:
                    show(self.result)
            self._is_over = True
            await asyncio.wait_for(asyncio.gather(*workers), WAIT_S)
        except Exception as error:  # any unexpected error breaks the promise
            self.result.broken.append(f"{type(error).__name__}: {error}")
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _stream(self, client: WatchedEngine, number: int) -> None:
        """Send one request after another until the soak ends."""
        for turn in itertools.count():
            if self._is_over:
                return
            index = (number + turn * 7) % len(self._baseline.cases)
            case = self._baseline.cases[index]
            if isinstance(case, Case):
                case = dataclasses.replace(case)  # a request id is made of the identity of its case
            self.comparison.compare(case, await outcome_of(client, case), self._baseline.expected[index])

    async def _disturb(self) -> None:
        """Disturb after a random number of outputs, and wait until the streams go on."""
        await self._outputs(self._chance.randint(1, 4 * len(self._baseline.cases)))
        disturbance = self._chance.choice(_DISTURBANCES)
        if disturbance == "kill the hostile client":
            self._hostile.start_again()
            return
        status = await asyncio.wait_for(self._clients[0].core_status(), WAIT_S)
        self._watch.strike()
        with contextlib.suppress(ProcessLookupError):  # another death came first
            os.kill(status["pid"], signal.SIGKILL if disturbance == "kill the core" else signal.SIGSTOP)
        self.result.kills += 1

        async def is_replaced() -> bool:
            return all(client.last_core_status()["incarnation"] > status["incarnation"] for client in self._clients)

        await eventually(is_replaced, WAIT_S)
        await self._outputs(1)
        if self._watch.next_token_s is not None:
            self.result.next_token_s.append(self._watch.next_token_s)
        now = await asyncio.wait_for(self._clients[0].core_status(), WAIT_S)
        self.result.samples.append(Sample.now(now["pid"], self._folder))

    async def _outputs(self, count: int) -> None:
        """Wait for `count` more outputs of the well-behaved clients."""
        target = self._watch.num_outputs + count

        async def have_come() -> bool:
            return self._watch.num_outputs >= target

        await eventually(have_come, WAIT_S)


class _Place(NamedTuple):
    """Where a shared core listens, with the keys that tcp needs."""

    address: str
    server_key: str | None = None
    client_keys: Sequence[str | None] = (None,) * (_NUM_CLIENTS + 1)
    """Key files; the last one is the hostile client's."""

    @classmethod
    def on_tcp(cls, folder: Path) -> "_Place":
        """Return a free port with keys for all clients, made in `folder`."""
        server = make_server_key(folder / "server.key")
        paths = [folder / f"client-{number}.key" for number in range(_NUM_CLIENTS + 1)]
        for path in paths:
            key = make_client_key(path, server.public)
            AuthorizedClients(folder / "server.key").allow(path.stem, key.public)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        return cls(f"tcp://127.0.0.1:{port}", str(folder / "server.key"), [str(path) for path in paths])


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
    result.restarts = result.kills
    result.settle(comparison, baseline, problems, began)
    return result
