"""What a server process costs per streamed token, measured over a stand-in for its core that computes nothing."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

from vllm_mp.replay_core.answers import Answers
from vllm_mp.testing.measuring.http_peers import SERVED_NAME, HttpPeer, Listening, our_server, serving, vllm_server
from vllm_mp.testing.measuring.peers import ROOT, Figures, VllmCpu
from vllm_mp.testing.measuring.stream_load import stream_load

_MIN_EVENTS = 0.9
"""Smallest number of events per token. A server that merges tokens into fewer events does less work."""


class FrontPeer(NamedTuple):
    """A server whose core is a stand-in: it answers each stream with recorded tokens at a fixed rate."""

    name: str
    start: Callable[[float], AbstractContextManager[Listening]]
    """Start the server with a stand-in that gives each stream this number of tokens per second."""
    prepare: Callable[[], None] = lambda: None


@contextlib.contextmanager
def over_replay_core(*flags: str, rate: float = 0.0) -> Iterator[Listening]:
    """Run this engine's server with `flags` over a replay core, which gives each stream `rate` tokens per second.

    Rate 0: as many as the core can send.
    """
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/core.sock"
        command = [sys.executable, "-m", "vllm_mp.replay_core", "--listen", address, "--rate", str(rate)]
        core = subprocess.Popen([*command, "--served-model-name", SERVED_NAME], env=_environment())
        try:
            server = our_server()
            connected = (sys.executable, "-m", "vllm_mp.cli", "serve", "--connect", address, *flags)
            with serving(HttpPeer(server.name, connected, server.environment, server.ready_path)) as listening:
                yield listening
        finally:
            core.terminate()
            core.wait()


def our_front() -> FrontPeer:
    """Return this engine's server over the replay core."""

    @contextlib.contextmanager
    def start(rate: float) -> Iterator[Listening]:
        with over_replay_core(rate=rate) as listening, _pinned(listening.pid):
            yield listening

    return FrontPeer("vllm_mp", start)


def vllm_front(vllm: VllmCpu) -> FrontPeer:
    """Return vLLM's server and core process, with an executor that runs no model."""

    @contextlib.contextmanager
    def start(rate: float) -> Iterator[Listening]:
        with tempfile.NamedTemporaryFile("w", suffix=".json") as tokens:
            json.dump(Answers().tokens[0].tolist(), tokens)
            tokens.flush()
            server = vllm_server(vllm)
            executor = "vllm_stand_in_executor.StandInExecutor"
            command = (*server.command, "--enforce-eager", "--distributed-executor-backend", executor)
            environment = {
                **server.environment,
                "PYTHONPATH": str(ROOT / "tools/peer_programs"),
                "STAND_IN_TOKENS": tokens.name,
                "STAND_IN_STEP_S": str(1 / rate),
            }
            peer = HttpPeer(server.name, command, environment, server.ready_path)
            with serving(peer) as listening, _pinned(listening.pid):
                yield listening

    return FrontPeer("vLLM", start, vllm.prepare)


def front_name(streams: int) -> str:
    """Return the name of the workload "streamed tokens per second of processor time of the server"."""
    return f"{streams} streams, tokens per CPU second"


def measure_front(url: str, pid: int, streams: int, output_len: int) -> Figures:
    """Return the output tokens per second of the server's processor time, for `streams` completions at a time.

    Raises RuntimeError if the server merges tokens into fewer events.
    """
    asyncio.run(stream_load(url, SERVED_NAME, min(streams, 16), 32))
    before = _cpu_seconds(pid)
    counts = asyncio.run(stream_load(url, SERVED_NAME, streams, output_len))
    used = _cpu_seconds(pid) - before
    if counts.events < _MIN_EVENTS * counts.tokens:
        raise RuntimeError(f"{counts.tokens} tokens of {streams} streams came in {counts.events} events; lower --rate")
    return {front_name(streams): counts.tokens / used}


def _cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used, with a resolution of nanoseconds."""
    # The number of a process's clock, as clock_getcpuclockid(3) computes it on Linux.
    return time.clock_gettime((~pid << 3) | 2)


@contextlib.contextmanager
def _pinned(pid: int) -> Iterator[None]:
    """Give the server's process a processor of its own; cores and this process get the others, until the block ends."""
    available = os.sched_getaffinity(0)
    first = min(available)
    _set_processors(available - {first} or available, except_pid=pid)
    _set_processors({first}, only_pid=pid)
    try:
        yield
    finally:
        _set_processors(available)  # the servers that this process starts next inherit its processors


def _set_processors(processors: set[int], only_pid: int | None = None, except_pid: int | None = None) -> None:
    """Let the threads of this process and its descendants run on `processors`."""
    import psutil

    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        if only_pid in (None, process.pid) and process.pid != except_pid:
            for thread in process.threads():
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(thread.id, processors)


def _environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
