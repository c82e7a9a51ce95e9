#!/usr/bin/env python3
"""Test and measure the engine on this machine's GPU in one call, and write the results to one JSON file.

    python tools/gpu_check.py --out results.json

It runs tests/gpu, then real engines with random weights in the shapes of known models, and compares their speed with
the best rates of the device, which the same run measures. It needs no network, no model and no installation of this
repository. A part that fails is recorded, and the others run. The exit code is 1 if any test or part failed.
"""

import argparse
import asyncio
import contextlib
import datetime
import functools
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.engine_speed import FULL, QUICK, Cost, Workload, measure, measure_idle, measure_load, running_engine
from shared.gpu_report import PACKAGES, Report, table
from shared.test_run import commit_of_tree, output_of, run_tests

if TYPE_CHECKING:
    from vllm_mp import AsyncLLM

ROOT = Path(__file__).resolve().parent.parent

TOOL_LIMIT_S = 120
TESTS_SHARE = 0.6
"""Share of the budget that the tests may take if other parts follow."""


def environment() -> dict[str, Any]:
    """Return the versions on which the figures depend; None for a package that is not installed."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "machine": platform.platform(),
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        **versions,
    }


def device_ceilings(workload: Workload, device: str, dtype: str) -> dict[str, Any]:
    """Return the figures of tools/device_ceilings.py."""
    sizes = ["--copy-bytes", str(workload.copy_bytes), "--matrix-size", str(workload.matrix_size)]
    return _run_tool("device_ceilings.py", "--device", device, "--dtype", dtype, *sizes)


def _run_tool(name: str, *arguments: str) -> dict[str, Any]:
    """Return the JSON that a tool prints. It runs in a separate process, whose end releases the device memory."""
    command = [sys.executable, str(ROOT / "tools" / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[1]} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def attention_speed(report: Report, quick: bool, device: str, dtype: str) -> None:
    """Add the figures of tools/attention_speed.py to the report, with their shares of the device's ceilings."""
    found = _run_tool("attention_speed.py", "--device", device, "--dtype", dtype, *["--quick"] * quick)
    for step in found["steps"]:
        cost = Cost(step.pop("memory_bytes"), step.pop("flops"))
        step["of_sdpa"] = step["sdpa_seconds"] and step["sdpa_seconds"] / step["seconds"]
        report.found["attention"].append({**step, **cost.shares(step["seconds"], report.found["ceilings"])})


def benchmark(report: Report, name: str, workload: Workload, device: str, dtype: str) -> None:
    """Measure one engine. Each start and each figure is a separate part of the report."""
    subject = workload.models[name]
    record: dict[str, Any] = {"dtype": dtype, "options": subject.options, "start_s": None, "start_s_rounds": []}
    record |= {"decode": [], "prefill": [], "loads": {}, "idle": None, "transformers": None}
    report.found["benchmarks"][name] = record
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        (Path(folder) / "config.json").write_text(json.dumps(subject.config))

        def start() -> "AsyncLLM":
            stack.close()
            begun = time.perf_counter()
            engine = stack.enter_context(running_engine(Path(folder), subject, workload.num_threads, device, dtype))
            record["start_s_rounds"].append(time.perf_counter() - begun)
            record["start_s"] = statistics.median(record["start_s_rounds"])
            return engine

        engine = report.attempt(f"{name} start", start)
        for _ in range(subject.starts - 1):
            if engine is not None:
                engine = report.attempt(f"{name} start", start)
        if engine is None:
            return

        def add_figure(kind: str, size: int) -> None:
            figure = asyncio.run(measure(kind, size, engine, workload, report.found["ceilings"]))
            record[kind].append(figure)

        def add_load(load_name: str) -> None:
            record["loads"][load_name] = asyncio.run(measure_load(engine, subject.loads[load_name]))

        def add_idle() -> None:
            record["idle"] = asyncio.run(measure_idle(engine))

        for kind, sizes in (("decode", subject.batches), ("prefill", subject.prefill_lens)):
            for size in sizes:
                report.attempt(f"{name} {kind} {size}", functools.partial(add_figure, kind, size))
        if subject.idle:
            report.attempt(f"{name} idle", add_idle)
        for load_name in subject.loads:
            report.attempt(f"{name} {load_name}", functools.partial(add_load, load_name))
        stack.close()

        def add_transformers() -> None:
            arguments = [folder, "--dummy", "--device", device, "--dtype", dtype, "--rounds", "1"]
            for option, sizes in (("--batches", subject.batches), ("--prompts", subject.prefill_lens)):
                arguments += [option, *map(str, sizes)]
            arguments += ["--prompt-len", str(workload.prompt_len), "--output-len", str(workload.output_len)]
            record["transformers"] = _run_tool("transformers_speed.py", *arguments)

        if subject.beside:
            report.attempt(f"{name} beside transformers", add_transformers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="device of tests and engines (%(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="use a tiny model and few rounds, to test the tool")
    parser.add_argument(
        "--budget-s", type=float, default=480, help="seconds after which no measurement starts (%(default)s)"
    )
    parser.add_argument(
        "--tests", nargs="+", default=["tests/gpu"], help="tests to run, relative to the repository (%(default)s)"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="PART", help="parts to run: tests, attention, or names of engines (all)"
    )
    parser.add_argument("--commit", help="commit to report, for a copy of the tree without git")
    args = parser.parse_args()
    # So this process, the tests and the cores find the repository, which need not be installed.
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ["HF_HUB_OFFLINE"] = "1"
    workload = QUICK if args.quick else FULL
    dtype = "bfloat16" if args.device == "cuda" else "float32"
    report = Report(
        args.out,
        args.budget_s,
        {
            "command": shlex.join(sys.argv),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": args.commit or commit_of_tree(),
            "device": args.device,
            "quick": args.quick,
        },
    )
    found = report.found
    found["environment"] = environment()
    found["ceilings"] = report.attempt("ceilings", lambda: device_ceilings(workload, args.device, dtype)) or {}

    def tests() -> None:
        share = 1.0 if wanted == ["tests"] else TESTS_SHARE
        environment = {"VLLM_MP_TEST_DEVICE": args.device}
        found["tests"] = run_tests(args.tests, share * args.budget_s, environment)

    parts: dict[str, Callable[[], None]] = {
        "tests": tests,
        "attention": lambda: attention_speed(report, args.quick, args.device, dtype),
        **{name: functools.partial(benchmark, report, name, workload, args.device, dtype) for name in workload.models},
    }
    wanted = args.only or list(parts)
    if unknown := set(wanted) - set(parts):
        parser.error(f"unknown part: --only {' '.join(sorted(unknown))}; choose from {', '.join(parts)}")
    if "tests" not in wanted:
        found["tests"] = None
    for name in wanted:
        report.attempt(name, parts[name])
    report.save()
    print(table(report.found))
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
