"""Small real engines and standalone cores, and what tests and tools ask of them."""

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from vllm_mp import AsyncEngineArgs, AsyncLLM, CompletionOutput, RequestOutput, RequestOutputKind, SamplingParams
from vllm_mp.keys.authorized_clients import AuthorizedClients
from vllm_mp.keys.curve_keys import make_client_key, make_server_key

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 2**28,
    "disable_log_requests": True,
    "check_invariants": True,
}
"""Options of a small real engine. It computes in float32, so that outputs can be compared token by token."""
STANDALONE_CORE = ("--dtype", "float32", "--max-model-len", "512", "--kv-cache-memory-bytes", str(2**27))
"""Flags of a standalone core."""


@contextlib.contextmanager
def running_engine(model: str | Path, **options: Any) -> Iterator[AsyncLLM]:
    """Run an engine of `model` with `options` on top of `ENGINE`. Shut it down at the end of the block."""
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(model), **{**ENGINE, **options}))
    try:
        yield engine
    finally:
        engine.shutdown()


@contextlib.contextmanager
def standalone_core(
    model: str | Path, address: str, *flags: str, before: str = "", stderr: int | IO[bytes] = subprocess.PIPE
) -> Iterator["subprocess.Popen[str]"]:
    """Run `vllm-mp engine` at `address` with `flags` on top of `STANDALONE_CORE`. End it by SIGTERM if it still runs.

    `before` is a line of shell that runs first in the process of the parent. Raises subprocess.TimeoutExpired if it
    has not ended 60 seconds after SIGTERM.
    """
    command = [sys.executable, "-m", "vllm_mp.cli", "engine", "--listen", address, "--model", str(model)]
    command += [*STANDALONE_CORE, *flags]
    if before:
        command = ["sh", "-c", f'{before}; exec "$@"', "sh", *command]
    process = subprocess.Popen(command, stderr=stderr, text=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


@contextlib.contextmanager
def replay_core(folder: Path, *flags: str) -> Iterator[str]:
    """Run a replay core with its socket in `folder`, and yield its address. End it by SIGTERM if it still runs."""
    address = f"ipc://{folder}/replay.sock"
    process = subprocess.Popen([sys.executable, "-m", "vllm_mp.replay_core", "--listen", address, *flags])
    try:
        yield address
    finally:
        process.terminate()
        process.wait(timeout=30)


def make_keys(folder: Path, clients: Sequence[str] = ("client",)) -> tuple[str, ...]:
    """Make the key of a server in `folder`, and keys of `clients` that it allows; return the paths of the files."""
    server = str(folder / "server.key")
    server_public = make_server_key(server).public
    files = [str(folder / f"{name}.key") for name in clients]
    for name, file in zip(clients, files, strict=True):
        AuthorizedClients(server).allow(name, make_client_key(file, server_public).public)
    return server, *files


def free_tcp_address() -> str:
    """Return the tcp:// address of a port of this machine at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


ENDLESS = SamplingParams(temperature=0, max_tokens=8000, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
"""Parameters of a request that lasts longer than any test, if its core answers at the pace of a model."""


def greedy(max_tokens: int | None, **params: Any) -> SamplingParams:
    """Return parameters of a greedy request that has one output, when it finishes."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, output_kind=RequestOutputKind.FINAL_ONLY, **params)


async def answer(engine: AsyncLLM, prompt: Any, params: SamplingParams, request_id: str | None = None) -> RequestOutput:
    """Return the last output of a request; raise what `generate` raises."""
    async for output in engine.generate(prompt, params, request_id):
        last = output
    return last


async def rest(stream: AsyncIterator[RequestOutput]) -> CompletionOutput:
    """Consume a stream to its end. Return the first completion of its last output."""
    async for output in stream:
        last = output
    return last.outputs[0]


async def eventually(condition: Callable[[], Awaitable[object]], timeout: float = 120.0) -> None:
    """Return as soon as `await condition()` is true; raise AssertionError after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not await condition():
        assert time.monotonic() < deadline, f"the condition did not become true within {timeout:g} s"
        await asyncio.sleep(0.01)


async def is_empty(engine: AsyncLLM) -> bool:
    """Return whether the core reports no request and only free blocks."""
    status = await engine.core_status()
    return bool(status["num_running"] == status["num_waiting"] == 0 and status["free_blocks"] == status["total_blocks"])


def num_waiting_is(engine: AsyncLLM, count: int) -> Callable[[], Awaitable[bool]]:
    """Return a condition for `eventually`: `count` requests wait in the core."""

    async def condition() -> bool:
        return bool((await engine.core_status())["num_waiting"] == count)

    return condition
