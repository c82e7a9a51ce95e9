"""`pytest --time-limit` fails tests that take too long, without shared fixtures and waits for a processor."""

import subprocess
import sys
from pathlib import Path

import pytest
from support import time_limit

ROOT = Path(__file__).parents[3]
TESTS = """
import subprocess, sys, time
import pytest

COMPUTE = "import time\\nwhile time.process_time() < 0.5: pass"

@pytest.fixture(scope="module")
def shared():
    time.sleep(0.5)

@pytest.fixture
def own():
    time.sleep(0.5)

def test_that_is_quick(): pass
def test_of_a_shared_fixture(shared): pass
def test_of_its_own_fixture(own): pass
def test_that_waits(): time.sleep(0.5)
def test_whose_child_computes(): subprocess.run([sys.executable, "-c", COMPUTE], check=True)
@pytest.mark.parametrize("case", [1, 2])
def test_with_a_limit_of_its_own(case): time.sleep(0.5)
"""
PLUGIN = """
from support import time_limit
from support.time_limit import pytest_addoption, pytest_configure

time_limit.EXCEPTIONS["test_times.py::test_with_a_limit_of_its_own"] = 300
"""


def test_tests_over_the_limit_fail_by_name_and_no_others(tmp_path):
    (tmp_path / "conftest.py").write_text(PLUGIN)
    (tmp_path / "test_times.py").write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        tmp_path,
        "--time-limit=0.05",
    ]
    paths = {"PYTHONPATH": f"{ROOT / 'tests'}"}
    run = subprocess.run([*command, "test_times.py"], cwd=tmp_path, env=paths, capture_output=True, text=True)
    failed = {
        line.partition("::")[2].partition(" ")[0] for line in run.stdout.splitlines() if line.startswith("FAILED")
    }
    computing = {"test_whose_child_computes"}
    waiting = {"test_of_its_own_fixture", "test_that_waits"} if time_limit._stalled_s() is not None else set()
    # On a busy machine a test that waits may count as waiting for a processor.
    assert computing <= failed <= computing | waiting, run.stdout
    assert "s of its own, the limit is 0.1 s: make it cheaper" in run.stdout


def test_every_exception_names_a_test():
    for name in time_limit.EXCEPTIONS:
        file, _, test = name.partition("::")
        assert f"def {test}(" in (ROOT / file).read_text(), f"{name} is in EXCEPTIONS and is no test"


def test_wait_for_a_processor_is_not_counted(monkeypatch):
    clock, stalled = iter([10.0, 15.0]), iter([1.0, 5.5])
    with monkeypatch.context() as patch:  # the plugin, which may measure this test, needs the real clock
        patch.setattr(time_limit, "_monotonic", lambda: next(clock))
        patch.setattr(time_limit, "_stalled_s", lambda: next(stalled))
        began, ended = time_limit._Used.now(), time_limit._Used.now()
    assert ended.elapsed - began.elapsed == pytest.approx(0.5)
