"""tools/mutations: its list of faults fits the code, and it tells faults that are caught from faults that are not."""

import importlib
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
SUBJECTS = {
    "cache",
    "client outputs",
    "kernels in C++",
    "kernels in Triton",
    "kernels in torch",
    "model readers",
    "sampler",
    "scheduler",
    "server",
    "supervisor",
    "suspects",
    "wire",
}
AREA = "def area(width, height):\n    return width * height\n"
AREA_TEST = "from core.area import area\n\ndef test_area():\n    assert area(2, 3) == 6\n"
BROKEN_TEST = "def test_broken():\n    assert False, 'broken'\n"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Return a function that imports a module of the tool."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # plugins take seconds to load
    return lambda name: importlib.import_module(f"vllm_mp.testing.mutations.{name}")


@pytest.fixture
def mutations(module: Callable[[str], Any]) -> Any:
    return module("mutation").load_mutations()


def test_old_text_of_each_fault_occurs_once_in_its_file(mutations):
    for mutation in mutations.values():
        text = (ROOT / mutation.file).read_text()
        assert mutation.applied_to(text) != text, mutation.name


def test_there_are_60_faults_and_some_of_each_subject(mutations):
    assert len(mutations) >= 60
    assert {mutation.subject for mutation in mutations.values()} == SUBJECTS
    assert sum(mutation.is_compiled for mutation in mutations.values()) >= 6


def test_tests_that_a_fault_names_exist(mutations):
    for mutation in mutations.values():
        assert mutation.tests, mutation.name
        for test in mutation.tests:
            file, _, function = test.partition("::")
            assert f"def {function}" in (ROOT / file).read_text(), f"{mutation.name} names {test}"


def test_text_that_no_longer_fits_and_names_that_repeat_are_errors(module, tmp_path):
    load = module("mutation").load_mutations
    fault = '[[mutation]]\nname = "a"\nfile = "f"\nold = "x"\nnew = "y"\neffect = "e"\ntests = ["t"]\n'
    (tmp_path / "one.toml").write_text(f'subject = "s"\n{fault}')
    with pytest.raises(ValueError, match="a: the old text occurs 2 times in f; adapt it"):
        load(tmp_path)["a"].applied_to("x x")
    (tmp_path / "two.toml").write_text(f'subject = "s"\n{fault}')
    with pytest.raises(ValueError, match=r"two mutations are named a; rename one in two\.toml"):
        load(tmp_path)


class Repository:
    """A repository of one function and its tests, with which the tool works in place of this one."""

    def __init__(self, module: Callable[[str], Any], folder: Path, **tests: str) -> None:
        self.module = module
        source = folder / "source"
        for path, text in {"core/area.py": AREA, **{f"tests/test_{name}.py": tests[name] for name in tests}}.items():
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            (source / path).write_text(text)
        subprocess.run(["git", "init", "-q", str(source)], check=True)
        self.folder = folder
        self.trials = module("trial").Trials(
            module("trees").Tree.copy_of(source, folder / "0" / "tree"), test_limit_s=60.0, limit_s=60.0
        )

    def try_out(
        self, new: str, test_set: str = "all", named: str = "tests/test_area.py", likely: Sequence[str] = ()
    ) -> Any:
        """Return what the tests make of `new` in place of the product."""
        mutation = self.module("mutation").Mutation(
            name="wrong-area",
            subject="geometry",
            file="core/area.py",
            old="width * height",
            new=new,
            effect="areas are wrong",
            tests=(named,),
        )
        tree = self.trials.tree.mutated(mutation, self.folder / "1" / "tree")
        return self.trials.run(mutation, tree, test_set, likely)


def test_fault_is_caught_by_the_named_test_that_fails(module, tmp_path):
    outcome = Repository(module, tmp_path, area=AREA_TEST).try_out("width + height", "named")
    assert outcome.failure == ("tests/test_area.py::test_area", "failed", "assert 5 == 6")
    assert not outcome.out_of_time


def test_test_that_caught_a_fault_before_runs_first(module, tmp_path):
    repository = Repository(module, tmp_path, area=AREA_TEST, none="def test_nothing(): pass\n")
    before = ["tests/test_gone.py::test_gone", "tests/test_none.py::test_gone", "tests/test_area.py::test_area"]
    outcome = repository.try_out("width + height", "named", named="tests/test_none.py", likely=before)
    assert outcome.failure == ("tests/test_area.py::test_area", "failed", "assert 5 == 6")


def test_fault_that_only_another_test_of_the_set_sees_is_caught(module, tmp_path):
    repository = Repository(module, tmp_path, other=AREA_TEST, none="def test_nothing(): pass\n")
    outcome = repository.try_out("width + height", named="tests/test_none.py")
    assert outcome.failure.test == "tests/test_other.py::test_area"


def test_fault_that_no_test_sees_is_not_caught(module, tmp_path):
    slow = f"import pytest\npytestmark = pytest.mark.slow\n{AREA_TEST}"
    outcome = Repository(module, tmp_path, area=slow).try_out("width + height", "named")
    assert (outcome.failure, outcome.out_of_time) == (None, False)


def test_test_that_fails_without_the_fault_catches_nothing(module, tmp_path):
    repository = Repository(module, tmp_path, area=BROKEN_TEST + AREA_TEST)
    outcome = repository.try_out("height * width", "named")
    assert outcome.failure is None
    assert repository.trials.unreliable == {"tests/test_area.py::test_broken": "AssertionError: broken"}


def test_fault_that_ends_the_tests_is_caught_by_the_test_that_ran(module, tmp_path):
    outcome = Repository(module, tmp_path, area=AREA_TEST).try_out("__import__('os').abort()", "named")
    assert outcome.failure[:2] == ("tests/test_area.py::test_area", "crash")


TIMEOUT = '["failed", "t.py::a", "Failed: Timeout (>120.0s) from pytest-timeout."]'


@pytest.mark.parametrize(
    ("events", "code", "stalled", "expected"),
    [
        ('["start", "t.py::a"]\n' + TIMEOUT, 1, False, ("t.py::a", "time limit")),
        ('["start", "t.py::a"]\n["start", "t.py::b"]', -9, True, ("t.py::b", "time limit")),
        ("", -9, True, ("collection", "time limit")),
        ("", 4, False, ("collection", "crash")),
        ('["start", "t.py::a"]', -9, False, None),  # the limit of the whole run
        ("", 5, False, None),  # no test of the file is in the set
    ],
)
def test_how_a_run_ended_is_told_from_its_events_and_its_exit_code(module, tmp_path, events, code, stalled, expected):
    (tmp_path / "events").write_text(events)
    (tmp_path / "log").write_text("last line")
    failure = module("trial")._failure(tmp_path / "events", code, stalled, tmp_path / "log")
    assert (failure and failure[:2]) == expected


def test_page_has_the_results_and_keeps_its_text(module, mutations, tmp_path):
    results = module("results")
    file, mutation = tmp_path / "results.json", next(iter(mutations.values()))
    failure = module("trial").Failure("tests/unit/test_a.py::test_b[1]", "failed", "assert 0")
    results.ResultsFile(file).add(mutation, "all", module("trial").Outcome(failure, 1.5), "abc")
    assert results.ResultsFile(file).catching_tests(mutation) == ["tests/unit/test_a.py::test_b"]
    results.ResultsFile(file).add(mutation, "default", module("trial").Outcome(None, 2.5), "abc")
    page = f"# Title\n\n{results._BEGIN}\n\nold tables\n"
    page = results.page_with_tables(page, [mutation], results.ResultsFile(file).results)
    assert page.startswith("# Title\n")
    assert "old tables" not in page
    row = next(line for line in page.splitlines() if f"**{mutation.name}**" in line)
    assert row.split(" | ")[1:] == ["–", "**no**", "yes", "test_b in test_a.py |"]
    with pytest.raises(ValueError, match="the page has no line"):
        results.page_with_tables("# Title\n", [mutation], {})
