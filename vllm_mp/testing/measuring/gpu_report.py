"""The report of tools/gpu_check.py: kept on disk while it grows, and shown as a table."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from vllm_mp.machine.file_owner import write_output

T = TypeVar("T")

PACKAGES = ("torch", "triton", "transformers", "flash-attn", "numpy", "pyzmq", "msgspec")
"""Packages whose versions are reported."""


class Report:
    """The findings. They are written to disk before every part, so little is lost if the tool is stopped."""

    def __init__(self, path: Path, budget_s: float, facts: dict[str, Any]) -> None:
        self.found: dict[str, Any] = {
            **facts,
            "environment": {},
            "ceilings": {},
            "tests": None,
            "attention": [],
            "linear": [],
            "launches": None,
            "benchmarks": {},
            "errors": [],
            "skipped": [],
        }
        self._path = path
        self._started = time.monotonic()
        self._budget_s = budget_s
        self.save()

    def save(self) -> None:
        """Replace the file by all findings so far."""
        self.found["seconds"] = round(self.seconds, 1)
        unfinished = self._path.with_name(self._path.name + ".partial")
        write_output(unfinished, json.dumps(self.found, indent=2) + "\n")
        unfinished.replace(self._path)

    def attempt(self, what: str, run: Callable[[], T]) -> T | None:
        """Return the result of `run`. If it fails, or the budget is already spent, note `what` and return None."""
        self.save()
        seconds = self.seconds
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
    def seconds(self) -> float:
        """The time since the report began."""
        return time.monotonic() - self._started

    @property
    def failed(self) -> bool:
        """Whether a part or a test failed, or tests ran of which none passed."""
        tests = self.found["tests"]
        if self.found["errors"]:
            return True
        return tests is not None and (
            not tests["passed"] or bool(tests["failed"] or tests["errors"] or tests["timed_out"])
        )


def table(found: dict[str, Any]) -> str:
    """Return the findings as a readable table."""
    ceilings, tests = found["ceilings"], found["tests"]
    lines = [f"commit {found['commit']}, {found['date']}, {found['seconds']:.0f} s"]
    facts = found["environment"]
    lines.append(", ".join(f"{key} {facts[key]}" for key in ("driver", "python", *PACKAGES) if facts.get(key)))
    if ceilings:
        copy, product = ceilings["copy_bytes_per_s"] / 1e9, ceilings["matmul_flops_per_s"] / 1e12
        lines.append(f"{ceilings['device']['name']}: copy {copy:,.0f} GB/s, matrix product {product:,.1f} TFLOP/s")
    if tests:
        counts = ", ".join(f"{tests[kind]} {kind}" for kind in ("passed", "failed", "errors", "skipped"))
        lines.append(f"tests: {counts}" + (", interrupted for lack of time" if tests["timed_out"] else ""))
        lines += [f"  {failure['test']}: {(failure['last_lines'] or ['?'])[-1]}" for failure in tests["failures"]]
    lines += _attention_lines(found["attention"])
    lines += _linear_lines(found["linear"])
    if found["benchmarks"]:
        lines.append(_row("engine", "measurement", "tokens/s", "of bandwidth", "of matrix rate", "of others"))
    for name, record in found["benchmarks"].items():
        lines += _benchmark_lines(name, record)
    lines += [f"failed: {error['part']}: {error['error']}" for error in found["errors"]]
    if found["skipped"]:
        lines.append(f"skipped for lack of time: {', '.join(found['skipped'])}")
    return "\n".join(lines)


def _attention_lines(steps: list[dict[str, Any]]) -> Iterator[str]:
    if steps:
        yield _row("attention", "", "µs", "of bandwidth", "of matrix rate", "of SDPA")
    for step in steps:
        shares = (step["share_of_bandwidth"], step["share_of_matrix_rate"], step["of_sdpa"])
        yield _row(step["step"], "", f"{1e6 * step['seconds']:,.1f}", *map(_percent, shares))


def _linear_lines(products: list[dict[str, Any]]) -> Iterator[str]:
    if products:
        shares = ("of bandwidth", "of torch's")
        yield _row("product", "rows", "µs, 16 bits", *shares, "µs, 8 bits", *shares)
    for product in products:
        theirs = product["fp8_torch_seconds"]
        yield _row(
            product["product"],
            str(product["rows"]),
            f"{1e6 * product['seconds']:,.1f}",
            _percent(product["share_of_bandwidth"]),
            _percent(product["torch_seconds"] / product["seconds"]),
            f"{1e6 * product['fp8_seconds']:,.1f}",
            _percent(product["fp8_share_of_bandwidth"]),
            _percent(theirs and theirs / product["fp8_seconds"]),
        )


def _benchmark_lines(name: str, record: dict[str, Any]) -> Iterator[str]:
    if record["start_s"] is not None:
        yield _row(name, "start", f"{record['start_s']:.2f} s")
    for kind, size in (("decode", "batch"), ("prefill", "prompt_len")):
        for figure in record[kind]:
            others = (record["transformers"] or {kind: {}})[kind].get(str(figure[size]))
            shares = (figure["share_of_bandwidth"], figure["share_of_matrix_rate"])
            of_others = others and figure["tokens_per_s"] / others
            yield _row(
                name, f"{kind} {figure[size]}", f"{figure['tokens_per_s']:,.0f}", *map(_percent, (*shares, of_others))
            )
    if record["idle"] is not None:
        yield _row(name, "device idle", _percent(record["idle"]["idle_share"]))
    for load_name, load in record["loads"].items():
        yield _row(name, load_name, f"{load['output_tokens_per_s']:,.0f}", "", "", _percent(load["of_published"]))


def _row(name: str, measurement: str, figure: str, *shares: str) -> str:
    return f"{name:<40}{measurement:<26}{figure:>12}" + "".join(f"{share:>16}" for share in shares)


def _percent(share: float | None) -> str:
    return "?" if share is None else f"{100 * share:.1f} %"
