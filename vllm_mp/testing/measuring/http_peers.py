"""HTTP servers to compare: this engine's and vLLM's, each a process of its own, measured by `vllm bench serve`."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from vllm_mp.model_store import resolve_model
from vllm_mp.testing.measuring.peers import MODEL, OUTPUT_LEN, PROMPT_LEN, ROOT, Figures, VllmCpu, run, wait_until_ready

SERVED_NAME = "bench"
"""Name of the model in requests to every server."""
_READY_S = 600.0
"""Limit of the start of a server; vLLM compiles its model for more than a minute."""
_STOP_S = 30.0
_MIN_REQUESTS = 12
_REQUESTS_PER_STREAM = 4
"""Requests of a measurement for each concurrent stream. The last requests run with free slots and must weigh little."""


@dataclass(frozen=True)
class HttpPeer:
    """A server to compare, started by a command."""

    name: str
    command: Sequence[str | Path]
    """The command without `--port`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    ready_path: str = "/health"
    """Path that answers with 200 once the server can serve."""


class Listening(NamedTuple):
    """A server that runs and is ready."""

    url: str
    pid: int


@contextlib.contextmanager
def serving(peer: HttpPeer) -> Iterator[Listening]:
    """Start the server on a free port of 127.0.0.1, wait until it is ready, and end it with its children afterwards.

    Raises RuntimeError with the end of its log if it does not become ready.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(part) for part in (*peer.command, "--port", port)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **peer.environment}
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            wait_until_ready(server, f"http://127.0.0.1:{port}{peer.ready_path}", peer.name, _READY_S)
            yield Listening(f"http://127.0.0.1:{port}", server.pid)
        except RuntimeError as error:
            log.seek(0)
            raise RuntimeError(f"{log.read()[-4000:].decode(errors='replace')}\n{error}") from error
        finally:
            _end(server)


def _end(server: "subprocess.Popen[bytes]") -> None:
    server.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(_STOP_S)
    # Its children are in its process group, also if the server has left them behind.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def our_server(python: Path = Path(sys.executable), dtype: str = "bfloat16") -> HttpPeer:
    """Return this engine's server."""
    options = ("--dtype", dtype, "--served-model-name", SERVED_NAME)
    command = (python, "-m", "vllm_mp.cli", "serve", resolve_model(MODEL), *options)
    return HttpPeer("vllm_mp", command, {"PYTHONPATH": str(ROOT)}, "/ready")


def vllm_server(vllm: VllmCpu, dtype: str = "bfloat16") -> HttpPeer:
    """Return vLLM's server, compiled."""
    options = ("--dtype", dtype, "--served-model-name", SERVED_NAME, "--host", "127.0.0.1")
    return HttpPeer(
        "vLLM", (vllm.program("vllm"), "serve", resolve_model(MODEL), *options), {"VLLM_CPU_KVCACHE_SPACE": "4"}
    )


def throughput_name(concurrency: int) -> str:
    """Return the name of the workload "output tokens per second with `concurrency` requests at a time"."""
    return f"{concurrency} at a time, output tokens/s"


def first_token_name(concurrency: int) -> str:
    """Return the name of the workload "median time to the first token"."""
    return f"{concurrency} at a time, ms to first token"


def gap_name(concurrency: int) -> str:
    """Return the name of the workload "median time between tokens"."""
    return f"{concurrency} at a time, ms between tokens"


def bench_serve(vllm: VllmCpu, url: str, concurrency: int, seed: int) -> Figures:
    """Return the figures of one run of `vllm bench serve` against the server at `url`.

    Prompts have 128 random tokens and completions 64 tokens. Equal seeds give equal prompts. Raises RuntimeError if a
    request fails.
    """
    count = max(_MIN_REQUESTS, _REQUESTS_PER_STREAM * concurrency)
    with tempfile.TemporaryDirectory() as folder:
        run(
            [
                *(vllm.program("vllm"), "bench", "serve", "--backend", "openai", "--base-url", url),
                *("--model", SERVED_NAME, "--tokenizer", resolve_model(MODEL), "--dataset-name", "random"),
                *("--random-input-len", PROMPT_LEN, "--random-output-len", OUTPUT_LEN, "--ignore-eos"),
                *("--temperature", 0, "--num-prompts", count, "--max-concurrency", concurrency, "--seed", seed),
                *("--num-warmups", min(concurrency, 4), "--disable-tqdm"),
                *("--save-result", "--result-dir", folder, "--result-filename", "result.json"),
            ]
        )
        result = json.loads((Path(folder) / "result.json").read_text())
    if result["completed"] != count:
        raise RuntimeError(f"{count - result['completed']} of {count} requests to {url} failed")
    return {
        throughput_name(concurrency): result["output_throughput"],
        first_token_name(concurrency): result["median_ttft_ms"],
        gap_name(concurrency): result["median_itl_ms"],
    }
