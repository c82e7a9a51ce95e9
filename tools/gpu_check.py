#!/usr/bin/env python3
"""Test and measure the engine on this machine's GPUs, and write the results to one JSON file.

    python tools/gpu_check.py --out results.json
    python tools/gpu_check.py --out 1.json --call first                     # 280 s: what is not known comes first
    python tools/gpu_check.py --out 2.json --call second --after 1.json

It runs tests/gpu, then real engines with random weights in the shapes of known models, and compares their speed with
the best rates of the device, which the same run measures. It needs no network, no model and no installation of this
repository. A part that fails is recorded, and the others run. The file is written after each part, and --after FILE
goes on where an earlier run ended. The exit code is 1 if any test or part failed.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the repository need not be installed

from vllm_mp.testing.measuring.engine_speed import (  # noqa: E402
    FULL,
    QUICK,
    Cost,
    Subject,
    Workload,
    measure,
    measure_idle,
    measure_load,
    running_engine,
)
from vllm_mp.testing.measuring.gpu_report import PACKAGES, Report, table  # noqa: E402
from vllm_mp.testing.measuring.gpu_stages import CALL_BUDGET_S, CALLS, STAGES, parts_of, test_files  # noqa: E402
from vllm_mp.testing.measuring.test_run import (  # noqa: E402
    commit_of_tree,
    failed_tests,
    joined,
    output_of,
    run_tests,
)

if TYPE_CHECKING:
    from vllm_mp import AsyncLLM

TOOL_LIMIT_S = 120
TUNE_LIMIT_S = 560
TESTS_SHARE = 0.6
"""Share of the budget that the tests may take if other parts follow."""
BUDGET_S = 480
TUNE_BUDGET_S = 420
"""Seconds after which the tuner begins no further entry."""
TUNED_KINDS = {
    "tune_attention": ("decode", "merge", "splits"),
    "tune_products": ("linear", "fp8", "fp8_parts", "fp8_library", "dependent_launch"),
}
"""The kernels that a step of decodes spends most of its time in, by part of the check."""


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
    """Return the figures of tools/gpu/device_ceilings.py."""
    sizes = ["--copy-bytes", str(workload.copy_bytes), "--matrix-size", str(workload.matrix_size)]
    return _run_tool("gpu/device_ceilings.py", "--device", device, "--dtype", dtype, *sizes)


def _run_tool(name: str, *arguments: str) -> dict[str, Any]:
    """Return the JSON that a tool prints."""
    result: dict[str, Any] = json.loads(_output_of_tool(TOOL_LIMIT_S, name, *arguments).splitlines()[-1])
    return result


def _output_of_tool(limit_s: float, name: str, *arguments: str) -> str:
    """Return what a tool prints. It runs in a separate process, whose end releases the device memory."""
    command = [sys.executable, str(ROOT / "tools" / name), *arguments]
    # Without a GPU the kernels run in Triton's interpreter.
    environment = {"TRITON_INTERPRET": "0" if "cuda" in arguments else "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=limit_s, check=False, env=os.environ | environment
    )
    if done.returncode:
        raise RuntimeError(f"{command[1]} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return done.stdout


def attention_speed(report: Report, quick: bool, device: str, dtype: str) -> None:
    """Add the figures of tools/speed/kernels/attention_speed.py, with their shares of the device's ceilings."""
    found = _run_tool("speed/kernels/attention_speed.py", "--device", device, "--dtype", dtype, *["--quick"] * quick)
    for step in found["steps"]:
        cost = Cost(step.pop("memory_bytes"), step.pop("flops"))
        step["of_sdpa"] = step["sdpa_seconds"] and step["sdpa_seconds"] / step["seconds"]
        report.found["attention"].append({**step, **cost.shares(step["seconds"], report.found["ceilings"])})


def linear_speed(report: Report, quick: bool, device: str) -> None:
    """Add the figures of tools/speed/kernels/linear_speed.py, with the share of the bandwidth that they reach."""
    found = _run_tool("speed/kernels/linear_speed.py", "--device", device, *["--quick"] * quick)
    bandwidth = report.found["ceilings"]["copy_bytes_per_s"]
    for product in found["products"]:
        product["share_of_bandwidth"] = product["memory_bytes"] / bandwidth / product["seconds"]
        product["fp8_share_of_bandwidth"] = product["fp8_memory_bytes"] / bandwidth / product["fp8_seconds"]
    report.found["linear"] = found["products"]


def tune(report: Report, kinds: Sequence[str], out: Path, quick: bool, device: str) -> None:
    """Tune kernels of these kinds; the launches are added to a file beside the report, and to the report."""
    tuned = out.with_name(f"{out.stem}-launches.json")
    options = ["--out", str(tuned), "--device", device, "--budget-s", str(TUNE_BUDGET_S), *["--quick"] * quick]
    _output_of_tool(TUNE_LIMIT_S, "gpu/tune_kernels.py", *options, "--only", *(kinds[:1] if quick else kinds))
    report.found["launches"] = json.loads(tuned.read_text())


def several_devices(report: Report, workload: Workload, device: str, dtype: str) -> None:
    """Measure one model on all devices, shared in each way, beside one device."""
    count = report.found["ceilings"]["device"].get("count", 2)  # on a CPU, ranks share the processor
    if count < 2:
        raise RuntimeError("this machine has one device; run this stage on a machine with several")
    name, whole = next(item for item in workload.models.items() if "bf16" in item[1].stages)
    plain = whole._replace(loads={}, idle=False, beside=False, starts=1)
    benchmark(report, name, plain, workload, device, dtype)
    for option in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        shared = plain._replace(options={**plain.options, option: count})
        benchmark(report, f"{name}, {option}={count}", shared, workload, device, dtype, count)


async def capture_all_graphs(engine: "AsyncLLM") -> None:
    """Wait until the core, which has no work, has captured the graphs that its start left out."""
    from vllm_mp.testing.engines import eventually

    async def are_captured() -> bool:
        return bool((await engine.core_status())["num_late_graphs"] == 0)

    await eventually(are_captured)


def benchmark(
    report: Report, name: str, subject: Subject, workload: Workload, device: str, dtype: str, num_devices: int = 1
) -> None:
    """Measure one engine. Each start and each figure is a separate part of the report."""
    ceilings = {
        rate: num_devices * value for rate, value in report.found["ceilings"].items() if rate.endswith("_per_s")
    }
    record: dict[str, Any] = {"dtype": dtype, "options": subject.options, "start_s": None, "start_s_rounds": []}
    record["late_graphs_s"] = None
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
            begun = time.perf_counter()
            asyncio.run(capture_all_graphs(engine))
            record["late_graphs_s"] = time.perf_counter() - begun
            return engine

        engine = report.attempt(f"{name} start", start)
        for _ in range(subject.starts - 1):
            if engine is not None:
                engine = report.attempt(f"{name} start", start)
        if engine is None:
            return

        def add_figure(kind: str, size: int) -> None:
            figure = asyncio.run(measure(kind, size, engine, workload, ceilings))
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
            record["transformers"] = _run_tool("speed/transformers_speed.py", *arguments)

        if subject.beside:
            report.attempt(f"{name} beside transformers", add_transformers)


class Check:
    """The parts of one call, by name; what they find goes into the report."""

    def __init__(self, args: argparse.Namespace, report: Report) -> None:
        self.workload = workload = QUICK if args.quick else FULL
        self._args = args
        self._report = report
        self._earlier = [json.loads(path.read_text()) for path in args.after]
        device, dtype = args.device, "bfloat16" if args.device == "cuda" else "float32"
        self.parts: dict[str, Callable[[], None]] = {
            "attention": lambda: attention_speed(report, args.quick, device, dtype),
            **{
                name: functools.partial(
                    benchmark, report, name, subject._replace(beside=args.beside), workload, device, dtype
                )
                for name, subject in workload.models.items()
            },
            "linear": lambda: linear_speed(report, args.quick, device),
            "devices": lambda: several_devices(report, workload, device, dtype),
            **{
                part: functools.partial(tune, report, kinds, args.out, args.quick, device)
                for part, kinds in TUNED_KINDS.items()
            },
        }
        report.found["environment"] = environment()
        ceilings = report.attempt("ceilings", lambda: device_ceilings(workload, device, dtype))
        report.found["ceilings"] = ceilings or {}

    def run_parts(self, names: list[str]) -> None:
        """Run these parts; one that fails does not stop the next."""
        for name in names:
            if name == "tests":
                self._test(self._args.tests or ["tests/gpu"], 1.0 if names == ["tests"] else TESTS_SHARE)
            else:
                self._run_part(name)

    def run_stages(self, names: list[str]) -> None:
        """Run the stages: first the tests that failed earlier."""
        failed = [test for found in self._earlier if found["tests"] for test in failed_tests(found["tests"])]
        if failed:
            self._test(failed, 1.0)
        for name in names:
            for part in parts_of(name, self.workload):
                if part == "tests":
                    self._test(self._args.tests or test_files(name), 1.0)
                else:
                    self._run_part(part)

    def _run_part(self, name: str) -> None:
        if not any(name in found["benchmarks"] or found.get(name) for found in self._earlier):
            self._report.attempt(name, self.parts[name])

    def _test(self, targets: list[str], share: float) -> None:
        """Run tests until this share of the budget is spent, file by file.

        Tests that look at the device's free memory or break the device run by themselves, after the others.
        """
        done = [target for found in self._earlier if found["tests"] for target in found["tests"].get("targets", [])]
        num_processes = max(1, (os.cpu_count() or 1) - 4)

        def run(target: str, marks: str, processes: int) -> None:
            limit_s = max(1.0, share * self._args.budget_s - self._report.seconds)
            environment = {"VLLM_MP_TEST_DEVICE": self._args.device}
            results = run_tests([target], limit_s, environment, marks, processes)
            results["targets"] = [] if results["timed_out"] else [f"{target} {marks}"]
            self._report.found["tests"] = joined(self._report.found["tests"], results)

        for marks, processes in (("not gpu_alone", num_processes), ("gpu_alone", 1)):
            for target in targets:
                if f"{target} {marks}" not in done:
                    what = f"tests {target} ({marks})"
                    self._report.attempt(what, functools.partial(run, target, marks, processes))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="device of tests and engines (%(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="use a tiny model and few rounds, to test the tool")
    parser.add_argument(
        "--budget-s",
        type=float,
        help=f"seconds after which no measurement starts ({BUDGET_S}; with --call {CALL_BUDGET_S})",
    )
    parser.add_argument(
        "--after",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="results of earlier runs: their failed tests run first, and what they measured or passed is left out",
    )
    parser.add_argument("--beside", action="store_true", help="measure transformers beside each engine")
    parser.add_argument(
        "--tests", nargs="+", help="tests to run, relative to the repository (tests/gpu, or those of the stages)"
    )
    names = [
        *(QUICK if "--quick" in sys.argv else FULL).models,
        "attention",
        "linear",
        "devices",
        *TUNED_KINDS,
        "tests",
    ]
    wanted = parser.add_mutually_exclusive_group()
    wanted.add_argument(
        "--only", nargs="+", choices=names, metavar="PART", help=f"parts to run: {', '.join(names)} (tests to engines)"
    )
    stages = "; ".join(f"{name}: {stage.purpose}" for name, stage in STAGES.items())
    wanted.add_argument("--stage", nargs="+", choices=STAGES, metavar="STAGE", help=f"stages to run: {stages}")
    calls = "; ".join(f"{name}: {', '.join(of_call)}" for name, of_call in CALLS.items())
    wanted.add_argument("--call", choices=CALLS, help=f"stages of a short call: {calls}")
    parser.add_argument("--commit", help="commit to report, for a copy of the tree without git")
    args = parser.parse_args()
    if args.call:
        args.stage = CALLS[args.call]
    if args.budget_s is None:
        args.budget_s = CALL_BUDGET_S if args.call else BUDGET_S
    return args


def main() -> int:
    args = parse_arguments()
    # So that the tests, the cores and other tools find the repository too.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ["HF_HUB_OFFLINE"] = "1"
    if args.device == "cuda":
        os.environ["TRITON_INTERPRET"] = "0"
    facts = {
        "command": shlex.join(sys.argv),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": args.commit or commit_of_tree(),
        "device": args.device,
        "quick": args.quick,
    }
    report = Report(args.out, args.budget_s, facts)
    check = Check(args, report)
    if not report.failed:  # without the device there is nothing to run
        if args.stage:
            check.run_stages(args.stage)
        else:
            check.run_parts(args.only or ["tests", "attention", *check.workload.models])
    report.save()
    print(table(report.found))
    return 1 if report.failed or report.found["skipped"] else 0


if __name__ == "__main__":
    sys.exit(main())
