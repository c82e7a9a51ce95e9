#!/usr/bin/env python3
"""Test and measure all builds of the CPU kernels that this machine can run, and write the results to one JSON file.

    python tools/cpu_check.py --out results.json

It runs the tests of the kernels, then measures each build in turns: the products of the default model's linear layers,
the attention of prompts, and whole steps of a model with random weights, in bfloat16, 8 bits and 4 bits; beside them
torch's products in bfloat16. It needs the builds of `tools/setup-venv test-all`, but no network and no model. The exit
code is 1 if a test failed.
"""

import argparse
import datetime
import json
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from vllm_mp.kernels.cpu.library import load
from vllm_mp.machine.cpu_info import KERNEL_BUILDS, cpu_name, obstacle, runnable_builds
from vllm_mp.machine.file_owner import write_output
from vllm_mp.testing.measuring.cpu_speed import FULL, QUICK, TORCH, measure
from vllm_mp.testing.measuring.roofline import measure_ceilings, product_dtype
from vllm_mp.testing.measuring.test_run import commit_of_tree, run_tests

SUBJECTS = ("cpu_kernels", "cpu_blocks", "cpu_experts", "mixture_decoder", "tiles")
TESTS = [f"tests/kernels/test_{name}.py" for name in SUBJECTS]


def why_not_measured(name: str, is_tested: bool) -> str:
    """Return why the build `name` is not measured."""
    reason = obstacle(name) or f"{name} is not built"
    if name == "amx" and is_tested and load(name) is not None:
        return f"{reason}; its tests run, with emulated instructions"
    return reason


def table(found: dict[str, Any]) -> str:
    """Return the findings as a readable table: milliseconds of each case, a column for each build."""
    lines = [f"{found['processor']}, {found['threads']} threads; commit {found['commit']}, {found['date']}"]
    if ceilings := found["ceilings"]:
        read, product = ceilings["bytes"] / 1e9, ceilings["flops"] / 1e9
        lines.append(
            f"reads {read:,.0f} GB/s, torch multiplies matrices in {product_dtype()} with {product:,.0f} GFLOP/s"
        )
    lines += found["cannot_run"]
    if tests := found["tests"]:
        counts = ", ".join(f"{tests[kind]} {kind}" for kind in ("passed", "failed", "errors", "skipped"))
        lines.append(f"tests: {counts}" + (", interrupted for lack of time" if tests["timed_out"] else ""))
        lines += [f"  {failure['test']}: {(failure['last_lines'] or ['?'])[-1]}" for failure in tests["failures"]]
    cases: dict[tuple[str, str, int], dict[str, float]] = {}
    for record in found["measured"]:
        seconds = cases.setdefault((record["kind"], record["precision"], record["size"]), {})
        seconds[record["build"]] = record["seconds"]
    columns = found["builds"]
    lines.append("")
    lines.append(f"{'milliseconds':<40}" + "".join(f"{name:>11}" for name in columns))
    for (kind, precision, size), seconds in cases.items():
        cells = (f"{1000 * seconds[name]:11,.2f}" if name in seconds else f"{'-':>11}" for name in columns)
        lines.append(f"{f'{kind}, {precision}, {size}':<40}" + "".join(cells))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--builds", nargs="+", metavar="BUILD", help=f"builds to measure, or {TORCH} (all)")
    parser.add_argument("--threads", type=int, help="threads to measure with (one for each processor)")
    parser.add_argument("--quick", action="store_true", help="measure a tiny model for one round, to test the tool")
    parser.add_argument(
        "--tests", nargs="*", default=TESTS, help="tests to run, relative to the repository; none without names"
    )
    parser.add_argument(
        "--tests-limit-s", type=float, default=600, help="seconds that the tests may take (%(default)s)"
    )
    args = parser.parse_args()
    built = [*(name for name in runnable_builds() if load(name) is not None), TORCH]
    if unknown := set(args.builds or ()) - set(built):
        parser.error(f"cannot measure {', '.join(sorted(unknown))}: give some of {', '.join(built)}")
    builds = args.builds or built
    torch.set_num_threads(args.threads or len(os.sched_getaffinity(0)))
    found: dict[str, Any] = {
        "command": shlex.join(sys.argv),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit_of_tree(),
        "processor": cpu_name() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "builds": builds,
        "cannot_run": [why_not_measured(name, bool(args.tests)) for name in KERNEL_BUILDS if name not in built],
        "ceilings": None if args.quick else measure_ceilings()._asdict(),
        "tests": None,
        "measured": [],
    }
    if args.tests:
        found["tests"] = run_tests(args.tests, args.tests_limit_s, {})
    for found["measured"] in measure(builds, QUICK if args.quick else FULL):
        write_output(args.out, json.dumps(found, indent=2) + "\n")
    print(table(found))
    tests = found["tests"]
    return int(bool(tests) and bool(not tests["passed"] or tests["failed"] or tests["errors"] or tests["timed_out"]))


if __name__ == "__main__":
    sys.exit(main())
