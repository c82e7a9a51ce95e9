"""The benchmark of start-up: from process start to the first token, and the cost of an idle engine."""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from vllm_mp.cli.bench.flags import add_json_flag, positive_integer, write_json
from vllm_mp.cli.bench.progress import progress
from vllm_mp.config.engine_args import AsyncEngineArgs

USAGE = "[OPTIONS]"

# A program that prints the seconds that `import vllm_mp` takes, and whether it loads torch.
_IMPORT = """
import json, sys, time
started = time.perf_counter()
import vllm_mp
print(json.dumps({"import_s": time.perf_counter() - started, "torch": "torch" in sys.modules}))
"""

# A program that starts an engine, and prints the times of its start, its memory and its CPU time while it is idle.
_START = """
import asyncio, json, sys, time
options, idle_s = json.loads(sys.argv[1]), float(sys.argv[2])
from vllm_mp import AsyncEngineArgs, AsyncLLM, SamplingParams

def cpu_s(pid):
    fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100

def memory_mb():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmRSS")).split()[1]) / 1000

async def main(llm):
    result = {"imported": imported, "ready": time.monotonic()}
    async for output in llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8)):
        result.setdefault("first_token", time.monotonic())
    status = await llm.core_status()
    before = cpu_s(status["pid"])
    time.sleep(idle_s)
    result["idle_cpu_percent"] = 100 * (cpu_s(status["pid"]) - before) / idle_s
    result["client_mb"] = memory_mb()
    result["torch"] = "torch" in sys.modules
    print(json.dumps(result))

imported = time.monotonic()
llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**options))
asyncio.run(main(llm))
llm.shutdown()
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rounds",
        type=positive_integer,
        default=3,
        metavar="N",
        help="Start the engine N times, and print the medians. Default: %(default)s.",
    )
    parser.add_argument(
        "--idle-seconds",
        type=float,
        default=5.0,
        metavar="X",
        help="Watch the idle engine for X seconds. Default: %(default)s.",
    )
    add_json_flag(parser)
    AsyncEngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    if not 0 < args.idle_seconds < 3600:
        raise ValueError(f"--idle-seconds must be above 0 and below 3600, got {args.idle_seconds}")
    engine_args = AsyncEngineArgs.from_cli_args(args)
    engine_args.create_engine_config()  # fetches and converts the model before the measurement
    options = json.dumps(dataclasses.asdict(engine_args))
    imports, starts = [], []
    with progress("processes", 3 * args.rounds + 1) as count_process:
        for _ in range(2 * args.rounds + 1):
            imports.append(_probe(_IMPORT))
            count_process()
        for _ in range(args.rounds):
            started = time.monotonic()
            probe = _probe(_START, options, str(args.idle_seconds))
            times = {f"{moment}_s": probe[moment] - started for moment in ("imported", "ready", "first_token")}
            starts.append({**probe, **times})
            count_process()
    figures = {
        "import vllm_mp, s": _median(imports, "import_s"),
        "process start to client imported, s": _median(starts, "imported_s"),
        "process start to engine ready, s": _median(starts, "ready_s"),
        "process start to first token, s": _median(starts, "first_token_s"),
        "client memory with tokenizer, MB": _median(starts, "client_mb"),
        "idle core, % of one CPU": _median(starts, "idle_cpu_percent"),
    }
    for name, value in figures.items():
        print(f"{name:<36} {value:8.3f}")
    print(f"{'torch loaded by the client':<36} {any(probe['torch'] for probe in imports + starts)!s:>8}")
    write_json(args.json, {"model": args.model, "cores": os.cpu_count(), **figures})
    return 0


def _probe(code: str, *arguments: str) -> dict[str, Any]:
    """Run `code` in a new interpreter and return the JSON object on the last line of its output.

    Raises RuntimeError, with the program's error output, if the program fails.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the measured process failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _median(probes: list[dict[str, Any]], name: str) -> float:
    """Return the median of the value `name` of all probes."""
    return float(statistics.median(probe[name] for probe in probes))
