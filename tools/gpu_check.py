#!/usr/bin/env python3
"""Prove and measure the engine on this machine's GPU in one call, and write what was found to one JSON file.

    python tools/gpu_check.py --out results.json

It runs tests/gpu, then real engines with random weights in the shapes of known models, and holds their speed against
what the device does at best, measured in the same run. It needs no network, no model and no installation of this
repository. A part that fails is recorded and the others run; the exit code is 1 if any test or part failed.
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
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from engine_speed import FULL, QUICK, Workload, measure, running_engine

if TYPE_CHECKING:
    from vllm_mp import AsyncLLM

T = TypeVar("T")

ROOT = Path(__file__).resolve().parent.parent

CEILINGS_LIMIT_S = 120
TESTS_SHARE = 0.6
"""Of the budget, what the tests may take at most."""
INTERRUPT_GRACE_S = 15

PACKAGES = ("torch", "triton", "transformers", "numpy", "pyzmq", "msgspec")


class Report:
    """The findings, written to disk before every part, so that little is lost when the tool is stopped."""

    def __init__(self, path: Path, budget_s: float, facts: dict[str, Any]) -> None:
        self.found: dict[str, Any] = {
            **facts,
            "environment": {},
            "ceilings": {},
            "tests": {},
            "benchmarks": {},
            "errors": [],
            "skipped": [],
        }
        self._path = path
        self._started = time.monotonic()
        self._budget_s = budget_s
        self.save()

    def save(self) -> None:
        self.found["seconds"] = round(time.monotonic() - self._started, 1)
        unfinished = self._path.with_name(self._path.name + ".partial")
        unfinished.write_text(json.dumps(self.found, indent=2) + "\n")
        unfinished.replace(self._path)

    def attempt(self, what: str, run: Callable[[], T]) -> T | None:
        """What `run` returns; None, noted under the name `what`, if it fails or the budget is spent before it."""
        self.save()
        seconds = time.monotonic() - self._started
        if seconds >= self._budget_s:
            self.found["skipped"].append(what)
            return None
        print(f"{seconds:6.1f} s  {what}", file=sys.stderr, flush=True)
        try:
            return run()
        except Exception as error:
            self.found["errors"].append({"part": what, "error": f"{type(error).__name__}: {error}"})
            print(f"          failed: {error}", file=sys.stderr, flush=True)
            return None

    @property
    def failed(self) -> bool:
        """Whether anything failed, or no test was there to show that anything works."""
        tests = self.found["tests"]
        if self.found["errors"] or not tests or not tests["passed"]:
            return True
        return bool(tests["failed"] or tests["errors"] or tests["timed_out"])


def environment() -> dict[str, Any]:
    """Versions of what the figures depend on; None for what is not there."""
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
        "driver": _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        **versions,
    }


def commit_of_tree() -> str | None:
    """The commit, marked if files differ from it; None where there is no git."""
    commit = _output_of("git", "-C", str(ROOT), "rev-parse", "HEAD")
    changed = commit and _output_of("git", "-C", str(ROOT), "status", "--porcelain")
    return f"{commit} with changes" if changed else commit


def _output_of(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def device_ceilings(workload: Workload, device: str, dtype: str) -> dict[str, Any]:
    """What tools/device_ceilings.py finds, in a process that gives the device's memory back."""
    command = [sys.executable, str(ROOT / "tools" / "device_ceilings.py"), "--device", device, "--dtype", dtype]
    command += ["--copy-bytes", str(workload.copy_bytes), "--matrix-size", str(workload.matrix_size)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CEILINGS_LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[1]} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def run_tests(targets: list[str], device: str, limit_s: float) -> dict[str, Any]:
    """Run pytest on `targets`, interrupted after `limit_s` seconds: counts, and each failure's name and last lines."""
    with tempfile.TemporaryDirectory() as folder:
        results, log = Path(folder) / "results.xml", Path(folder) / "log"
        command = [sys.executable, "-m", "pytest", "-q", "-c", "pyproject.toml", "-p", "no:cacheprovider"]
        command += [f"--junitxml={results}", *targets]
        with log.open("wb") as output:
            pytest = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=output, env={**os.environ, "VLLM_MP_TEST_DEVICE": device}
            )
            timed_out = False
            try:
                code = pytest.wait(limit_s)
            except subprocess.TimeoutExpired:
                timed_out = True
                code = _interrupt(pytest)
        tail = log.read_text(errors="replace").splitlines()[-12:]
        if not results.exists():
            raise RuntimeError(f"pytest ended with {code} and no results: " + "\n".join(tail))
        record = _read_junit(results, timed_out)
    record["timed_out"] = timed_out
    record["log_tail"] = tail
    return record


def _interrupt(pytest: "subprocess.Popen[bytes]") -> int:
    """End pytest so that it still writes its results, if it can."""
    pytest.send_signal(signal.SIGINT)
    try:
        return pytest.wait(INTERRUPT_GRACE_S)
    except subprocess.TimeoutExpired:
        pytest.kill()
        return pytest.wait()


def _read_junit(path: Path, interrupted: bool) -> dict[str, Any]:
    counts = {"passed": 0, "failed": 0, "errors": 0, "skipped": 0}
    kinds = {"failure": "failed", "error": "errors", "skipped": "skipped"}
    failures = []
    suite = next(ET.parse(path).iter("testsuite"))
    cases = list(suite.iter("testcase"))
    if interrupted and cases and not len(cases[-1]):
        del cases[-1]  # it was running, and stands there as if it had passed
    for case in cases:
        outcomes = [child for child in case if child.tag in kinds]
        if not outcomes:
            counts["passed"] += 1
        for outcome in outcomes:
            counts[kinds[outcome.tag]] += 1
            if outcome.tag != "skipped":
                lines = (outcome.text or outcome.get("message") or "").strip().splitlines()
                failures.append({"test": f"{case.get('classname')}::{case.get('name')}", "last_lines": lines[-8:]})
    return {**counts, "failures": failures, "seconds": float(suite.get("time", 0))}


def benchmark(report: Report, name: str, workload: Workload, device: str, dtype: str) -> None:
    """Measure one model; each start and each figure is a part of its own."""
    record: dict[str, Any] = {"dtype": dtype, "start_s": None, "start_s_rounds": [], "decode": [], "prefill": []}
    report.found["benchmarks"][name] = record
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        (Path(folder) / "config.json").write_text(json.dumps(workload.models[name]))

        def start() -> "AsyncLLM":
            stack.close()
            begun = time.perf_counter()
            engine = stack.enter_context(running_engine(Path(folder), workload, device, dtype))
            record["start_s_rounds"].append(time.perf_counter() - begun)
            record["start_s"] = statistics.median(record["start_s_rounds"])
            return engine

        engine = report.attempt(f"{name} start", start)
        for _ in range(workload.rounds - 1):
            if engine is not None:
                engine = report.attempt(f"{name} start", start)
        if engine is None:
            return

        def add_figure(kind: str, size: int) -> None:
            figure = asyncio.run(measure(kind, size, engine, workload, report.found["ceilings"]))
            record[kind].append(figure)

        figures = [("decode", batch) for batch in workload.batches]
        figures += [("prefill", length) for length in workload.prefill_lens]
        for kind, size in figures:
            report.attempt(f"{name} {kind} {size}", functools.partial(add_figure, kind, size))


def table(found: dict[str, Any]) -> str:
    """The findings for a reader."""
    ceilings, tests = found["ceilings"], found["tests"]
    lines = [f"commit {found['commit']}, {found['date']}, {found['seconds']:.0f} s"]
    facts = found["environment"]
    lines.append(", ".join(f"{key} {facts[key]}" for key in ("driver", "python", *PACKAGES) if facts.get(key)))
    if ceilings:
        copy, product = ceilings["copy_bytes_per_s"] / 1e9, ceilings["matmul_flops_per_s"] / 1e12
        lines.append(f"{ceilings['device']['name']}: copy {copy:,.0f} GB/s, matrix product {product:,.1f} TFLOP/s")
    if tests:
        counts = ", ".join(f"{tests[kind]} {kind}" for kind in ("passed", "failed", "errors", "skipped"))
        lines.append(f"tests: {counts}" + (", interrupted for want of time" if tests["timed_out"] else ""))
        lines += [f"  {failure['test']}: {(failure['last_lines'] or ['?'])[-1]}" for failure in tests["failures"]]
    lines.append(f"{'model':<14}{'measurement':<16}{'tokens/s':>12}{'of bandwidth':>14}{'of matrix rate':>16}")
    for name, record in found["benchmarks"].items():
        if record["start_s"] is not None:
            lines.append(f"{name:<14}ready in {record['start_s']:.2f} s")
        for kind, size in (("decode", "batch"), ("prefill", "prompt_len")):
            for figure in record[kind]:
                shares = (_percent(figure["share_of_bandwidth"]), _percent(figure["share_of_matrix_rate"]))
                lines.append(
                    f"{name:<14}{f'{kind} {figure[size]}':<16}{figure['tokens_per_s']:>12,.0f}"
                    f"{shares[0]:>14}{shares[1]:>16}"
                )
    lines += [f"failed: {error['part']}: {error['error']}" for error in found["errors"]]
    if found["skipped"]:
        lines.append(f"skipped for want of time: {', '.join(found['skipped'])}")
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "?" if share is None else f"{100 * share:.1f} %"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where to run (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few rounds, to try the tool itself")
    parser.add_argument(
        "--budget-s", type=float, default=420, help="seconds after which no measurement begins (%(default)s)"
    )
    parser.add_argument(
        "--tests", nargs="+", default=["tests/gpu"], help="what pytest runs, seen from the repository (%(default)s)"
    )
    parser.add_argument("--commit", help="the commit, for a copy of the tree without git")
    args = parser.parse_args()
    # For this process, the tests and the cores: the repository need not be installed.
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
    limit_s = TESTS_SHARE * args.budget_s
    found["tests"] = report.attempt("tests", lambda: run_tests(args.tests, args.device, limit_s)) or {}
    for name in workload.models:
        report.attempt(name, functools.partial(benchmark, report, name, workload, args.device, dtype))
    report.save()
    print(table(report.found))
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
