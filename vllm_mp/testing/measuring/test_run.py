"""A run of tests and the commit that it tests, for tools that check a machine."""

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]

INTERRUPT_GRACE_S = 15


def commit_of_tree() -> str | None:
    """Return the commit, marked if files differ from it; None without git."""
    commit = output_of("git", "-C", str(ROOT), "rev-parse", "HEAD")
    changed = commit and output_of("git", "-C", str(ROOT), "status", "--porcelain")
    return f"{commit} with changes" if changed else commit


def output_of(*command: str) -> str | None:
    """Return what a command prints; None if it fails or prints nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def run_tests(
    targets: list[str], limit_s: float, environment: dict[str, str], marks: str = "", num_processes: int = 1
) -> dict[str, Any]:
    """Run pytest on `targets` for at most `limit_s` seconds. Return counts, and each failure's name and last lines.

    `environment` is added to the variables of this process. `marks` selects tests as pytest's option -m does. They are
    spread over `num_processes` if pytest-xdist is installed.
    """
    with tempfile.TemporaryDirectory() as folder:
        results, log = Path(folder) / "results.xml", Path(folder) / "log"
        command = [sys.executable, "-m", "pytest", "-q", "-c", "pyproject.toml", "-p", "no:cacheprovider"]
        # This form of the file names each test's file.
        command += ["-o", "junit_family=xunit1", f"--junitxml={results}", "-m", marks, *targets]
        if num_processes > 1 and importlib.util.find_spec("xdist") is not None:
            command += ["-n", str(num_processes)]
        with log.open("wb") as output:
            pytest = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=output, env={**os.environ, **environment}
            )
            timed_out = False
            try:
                code = pytest.wait(limit_s)
            except subprocess.TimeoutExpired:
                timed_out = True
                code = _interrupt(pytest)
        tail = log.read_text(errors="replace").splitlines()[-12:]
        if not results.exists():
            raise RuntimeError(f"pytest ended with exit code {code} and no results: " + "\n".join(tail))
        record = _read_junit(results, timed_out)
    record["timed_out"] = timed_out
    record["log_tail"] = tail
    return record


def failed_tests(record: dict[str, Any]) -> list[str]:
    """Return the tests that failed in a result of `run_tests`, as pytest names them."""
    return [f"{failure['file']}::{failure['test'].rpartition('::')[2]}" for failure in record["failures"]]


def joined(first: dict[str, Any] | None, second: dict[str, Any]) -> dict[str, Any]:
    """Return the results of two runs of tests as those of one."""
    if first is None:
        return second
    return {key: first[key] + second[key] for key in second} | {"timed_out": first["timed_out"] or second["timed_out"]}


def _interrupt(pytest: "subprocess.Popen[bytes]") -> int:
    """Interrupt pytest, so that it writes its results; kill it if it does not end. Return its exit code."""
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
        del cases[-1]  # it was still running, but is listed as if it had passed
    for case in cases:
        outcomes = [child for child in case if child.tag in kinds]
        if not outcomes:
            counts["passed"] += 1
        for outcome in outcomes:
            counts[kinds[outcome.tag]] += 1
            if outcome.tag != "skipped":
                lines = (outcome.text or outcome.get("message") or "").strip().splitlines()
                name = f"{case.get('classname')}::{case.get('name')}"
                failures.append({"test": name, "file": case.get("file"), "last_lines": lines[-8:]})
    return {**counts, "failures": failures, "seconds": float(suite.get("time", 0))}
