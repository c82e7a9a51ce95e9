"""tests/support/run_summary.py, on reports that pytest writes."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TESTS = """
import pytest

def test_good(): pass

@pytest.mark.parametrize("word", ["a b", "c"])
def test_word(word): assert word == "c"

@pytest.fixture
def broken():
    yield
    raise OSError

def test_fails_twice(broken): assert False

@pytest.mark.skip(reason="root reads every file")
def test_later(): pass

class TestClass:
    def test_method(self): assert False
"""
NO_GPU = "import pytest\n\n@pytest.mark.skip(reason='no CUDA device')\ndef test_kernel(): pass\n"


def report(tmp_path, **files):
    """Run pytest on files with these contents; return its report."""
    for name, content in files.items():
        folder = tmp_path / "tests" / name.partition("_")[0]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"test_{name}.py").write_text(content)
    path = tmp_path / f"{'-'.join(files)}.xml"
    command = [sys.executable, "-m", "pytest", "--import-mode=importlib", f"--rootdir={tmp_path}", "tests"]
    options = ["-p", "no:cacheprovider", "--continue-on-collection-errors", f"--junit-xml={path}"]
    # The plugins that this environment has take seconds to load, and the reports need none.
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    subprocess.run([*command, *options], cwd=tmp_path, env=env, capture_output=True, check=False)
    return path


def summarize(*reports, exit_code=1, options=(), cwd=None):
    runs = [argument for report in reports for argument in (str(exit_code), report)]
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "support" / "run_summary.py", *options, "683", *runs],
        cwd=cwd,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout.splitlines()


def test_failed_tests_are_named_so_that_each_can_be_run_alone(tmp_path):
    code, lines = summarize(report(tmp_path, unit_some=TESTS, unit_broken="import no_such_module", gpu_one=NO_GPU))
    assert code == 1
    *named, counts = lines
    assert sorted(named) == [
        "  tools/test 'tests/unit/test_unit_broken.py'",
        "  tools/test 'tests/unit/test_unit_some.py::TestClass::test_method'",
        "  tools/test 'tests/unit/test_unit_some.py::test_fails_twice'",
        "  tools/test 'tests/unit/test_unit_some.py::test_word[a b]'",
        "Failed; to run each test alone:",
    ]
    assert counts == "2 tests passed, 2 skipped (1 need a GPU, 1: root reads every file), 4 tests failed in 11 min 23 s"


def test_files_whose_tests_take_the_most_time_are_named(tmp_path):
    cases = ((f"tests.unit.test_{i}", name, 2.5 + i) for i in range(11) for name in ("one", "two[a]"))
    tests = "".join(f'<testcase classname="{file}" name="{name}" time="{time}"/>' for file, name, time in cases)
    path = tmp_path / "report.xml"
    path.write_text(f"<testsuites><testsuite>{tests}</testsuite></testsuites>")
    named = ", ".join(f"tests/unit/test_{i}.py {5 + 2 * i}" for i in range(10, 2, -1))
    assert summarize(path, exit_code=0)[1][0] == f"most time, in seconds: {named}"


def test_reports_are_added_up_and_a_missing_report_is_a_failure(tmp_path):
    good = report(tmp_path, unit_good="def test_good(): pass")
    assert summarize(good, good, exit_code=0) == (0, ["2 tests passed, 0 skipped, 0 tests failed in 11 min 23 s"])
    code, (lost, counts) = summarize(good, tmp_path / "killed.xml", exit_code=0)
    assert code == 1
    assert summarize(good, exit_code=1)[0] == 1, "pytest failed although no test did"
    assert lost.startswith("no report in killed.xml, so pytest crashed or was killed")
    assert counts.startswith("1 tests passed")


def test_failed_tests_run_again_alone(tmp_path):
    tests = f"""
from pathlib import Path

def test_only_at_first():
    seen = Path({str(tmp_path / "seen")!r})
    assert seen.exists() or seen.touch()

def test_always(): assert False
"""
    code, lines = summarize(report(tmp_path, unit_some=tests), options=["--again"], cwd=tmp_path)
    assert code == 1
    assert lines[-5:] == [
        "Failed; to run each test alone:",
        "  tools/test 'tests/unit/test_unit_some.py::test_always'",
        "Unstable, failed at first and passed alone:",
        "  tests/unit/test_unit_some.py::test_only_at_first",
        "1 tests passed, 0 skipped, 1 tests failed in 11 min 23 s",
    ]
    (tmp_path / "seen").unlink()
    stable = tests.partition("def test_always")[0]
    assert summarize(report(tmp_path, unit_some=stable), options=["--again"], cwd=tmp_path)[0] == 0


def test_interrupted_run_is_no_success(tmp_path):
    passed = report(tmp_path, unit_fine="def test_fine(): pass\n")
    assert summarize(passed, exit_code=0)[0] == 0
    code, lines = summarize(passed, exit_code=2)
    assert code == 1
    assert f"the run of {passed.name} was interrupted (pytest's exit code 2)" in lines


def test_run_that_selects_no_test_is_no_success(tmp_path):
    empty = report(tmp_path, unit_empty="")
    code, lines = summarize(empty, exit_code=5)
    assert code == 1
    assert f"the run of {empty.name} selected no test (pytest's exit code 5)" in lines
