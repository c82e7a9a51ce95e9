"""tools/cpu_check.py measures every compiled build that runs here."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_mp.kernels.cpu.library import load
from vllm_mp.machine.cpu_info import KERNEL_BUILDS, obstacle, runnable_builds

TOOLS = Path(__file__).resolve().parents[3] / "tools"


@pytest.fixture
def cpu_check(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(TOOLS)
    return importlib.import_module("cpu_check")


def run(cpu_check: Any, monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(sys, "argv", ["cpu_check.py", "--quick", "--out", str(out), *arguments])
    return cpu_check.main(), json.loads(out.read_text())


@pytest.mark.extended
def test_each_build_has_a_figure_for_each_case(cpu_check, monkeypatch, tmp_path, capsys):
    code, found = run(cpu_check, monkeypatch, tmp_path / "results.json", "--tests")
    assert code == 0
    builds = [name for name in runnable_builds() if load(name) is not None]
    assert found["builds"] == [*builds, "torch"]
    missing = [obstacle(name) or f"{name} is not built" for name in KERNEL_BUILDS if name not in builds]
    assert found["cannot_run"] == missing
    linears = [("linears", precision, rows) for precision in ("bfloat16", "int8", "int4") for rows in (1, 40)]
    steps = [
        (kind, precision, size)
        for precision in ("bfloat16", "int8", "int4")
        for kind, size in (("decode", 1), ("decode", 4), ("prompt", 33))
    ]
    cases = [*linears, ("attention in one layer", "bfloat16", 33), *steps]
    measured = [(record["build"], record["kind"], record["precision"], record["size"]) for record in found["measured"]]
    assert measured == [(build, *case) for build in builds for case in cases] + [
        ("torch", *case) for case in linears[:2]
    ]
    assert all(record["seconds"] > 0 for record in found["measured"])
    printed = capsys.readouterr().out
    assert found["processor"] in printed.splitlines()[0]
    assert f"{1000 * found['measured'][0]['seconds']:,.2f}" in printed


@pytest.mark.parametrize(("failed", "expected"), [(0, 0), (1, 1)])
def test_failed_tests_fail_the_run_after_measuring(cpu_check, monkeypatch, tmp_path, capsys, failed, expected):
    failures = [{"test": "kernels::test_bad", "last_lines": ["AssertionError"]}] * failed
    tests = {"passed": 3, "failed": failed, "errors": 0, "skipped": 0, "timed_out": False, "failures": failures}
    monkeypatch.setattr(cpu_check, "run_tests", lambda *_: tests)
    code, found = run(cpu_check, monkeypatch, tmp_path / "results.json", "--builds", "torch")
    assert code == expected
    assert found["tests"] == tests
    assert {record["build"] for record in found["measured"]} == {"torch"}
    assert ("  kernels::test_bad: AssertionError" in capsys.readouterr().out.splitlines()) == bool(failed)


def test_build_that_cannot_run_is_refused(cpu_check, monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(cpu_check, monkeypatch, tmp_path / "results.json", "--builds", "sse")
    assert "cannot measure sse: give some of " in capsys.readouterr().err
