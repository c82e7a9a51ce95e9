"""Runs of tests on a tree with a mutation, until a test catches it.

A test that fails has caught the mutation only if it passes on the unchanged tree. If it fails there too, it is left out
and reported, and the run goes on without it.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from vllm_mp.testing.mutations.mutation import Mutation, test_file
from vllm_mp.testing.mutations.plugin.mutation_events import EVENTS_VARIABLE
from vllm_mp.testing.mutations.trees import Tree

EXPRESSIONS = {
    "named": "not slow",
    "default": "not slow and not extended",
    "all": "not slow",
    "slow": "",
}
"""The marker expression of each set of tests. "named" has only the tests that the mutation names."""
_PLUGINS = Path(__file__).resolve().parent / "plugin"
_PLUGIN = "mutation_events"
COLLECTION = "collection"
"""Stands for the test if pytest failed before the first."""
_TIMEOUT = "Timeout ("
"""How errors of pytest-timeout begin."""
_STALL_MARGIN_S = 90.0
"""Time without an event, beyond the limit of a test, after which pytest itself hangs."""
_POLL_S = 0.2
_LISTS_TEST = "tests/unit/tools/test_mutations.py::test_old_text_of_each_fault_occurs_once_in_its_file"
"""It compares the lists of faults with the code, so it fails for each of them."""
_GOOD_CODES = (0, 5)
"""Exit codes of pytest: all tests passed, or none was selected."""


class Failure(NamedTuple):
    """The test that ended a run, and how."""

    test: str
    how: str
    """"failed", "time limit", or "crash" for the death of pytest itself."""
    message: str


@dataclass(frozen=True)
class Outcome:
    """What a set of tests made of a mutation."""

    failure: Failure | None
    """None: all tests passed."""
    seconds: float
    out_of_time: bool = False
    """The limit for the whole set was reached before its end."""


@dataclass
class Trials:
    """Tries mutations with a set of tests."""

    tree: Tree
    """The unchanged tree."""
    test_limit_s: float
    """Limit for a single test, unless the test has a limit of its own."""
    limit_s: float
    """Limit for all tests on one mutation."""
    unreliable: dict[str, str] = field(default_factory=dict)
    """Tests that fail on the unchanged tree, with the last line of their errors."""
    _good: set[str] = field(default_factory=set)
    """Tests that pass on the unchanged tree."""

    def run(self, mutation: Mutation, tree: Tree, test_set: str, likely: Sequence[str] = ()) -> Outcome:
        """Run a set of tests on `tree`, which has `mutation`: `likely`, then those that it names, then all others.

        `likely` has node ids of tests, which may not exist any more. Returns as soon as a test that passes on the
        unchanged tree fails.
        """
        begin = time.monotonic()
        expression = EXPRESSIONS[test_set]
        failure = None
        for test in likely:
            failure = failure or run_pytest(tree, ["-m", expression, test], self.test_limit_s, self.limit_s)
            if failure is not None and (failure.test == COLLECTION or not self._passes_unchanged(failure.test, [test])):
                failure = None
        if failure is None:
            failure = self._first_failure(tree, [*mutation.tests], expression, begin + self.limit_s)
        if failure is None and test_set != "named":
            files = {str(path.relative_to(tree.root)) for path in (tree.root / "tests").rglob("test_*.py")}
            others = sorted(files - set(mutation.tests))
            done = [test for test in mutation.tests if test != test_file(test)]
            failure = self._first_failure(tree, others, expression, begin + self.limit_s, done)
        seconds = time.monotonic() - begin
        return Outcome(failure, round(seconds, 1), failure is None and seconds >= self.limit_s)

    def _first_failure(
        self, tree: Tree, targets: list[str], expression: str, deadline: float, left_out: Sequence[str] = ()
    ) -> Failure | None:
        """Run `targets` without the tests `left_out`; return the first failure of a test that passes unchanged."""
        while (left_s := deadline - time.monotonic()) > 0:
            targets = [test for test in targets if test not in self.unreliable]
            if not targets:
                return None
            arguments = ["-m", expression, *targets]
            for test in (_LISTS_TEST, *left_out, *self.unreliable):
                arguments += ["--deselect", test]
            failure = run_pytest(tree, arguments, self.test_limit_s, left_s)
            if failure is None or self._passes_unchanged(failure.test, targets):
                return failure
        return None

    def _passes_unchanged(self, test: str, targets: list[str]) -> bool:
        """Return whether `test` passes on the unchanged tree; if not, note it as unreliable.

        Raises RuntimeError if the unchanged tree cannot even collect the tests in `targets`.
        """
        if test == COLLECTION:
            failure = run_pytest(self.tree, ["--collect-only", *targets], self.test_limit_s, self.limit_s)
            if failure is not None:
                raise RuntimeError(f"pytest does not find the tests {' '.join(targets)}: {failure.message}")
            return True
        if test not in self._good and test not in self.unreliable:
            failure = run_pytest(self.tree, [test], self.test_limit_s, self.limit_s)
            if failure is None:
                self._good.add(test)
            else:
                self.unreliable[test] = failure.message
        return test in self._good


def run_pytest(tree: Tree, arguments: list[str], test_limit_s: float, limit_s: float) -> Failure | None:
    """Run pytest on `tree` until a test fails or `limit_s` is over; return the failure, None if no test failed."""
    events = tree.root.parent / "events"
    events.write_text("")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", _PLUGIN]
    command += ["-o", f"timeout={test_limit_s:g}", *arguments]
    environment = {**tree.environment(_PLUGINS), EVENTS_VARIABLE: str(events)}
    with (tree.root.parent / "log").open("wb") as log:
        pytest = subprocess.Popen(
            command, cwd=tree.root, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            stalled = _wait(pytest, events, test_limit_s + _STALL_MARGIN_S, limit_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pytest.pid, signal.SIGKILL)
            pytest.wait()
    return _failure(events, pytest.returncode, stalled, tree.root.parent / "log")


def _wait(pytest: "subprocess.Popen[bytes]", events: Path, stall_s: float, limit_s: float) -> bool:
    """Wait for the end of pytest, at most `limit_s`; return whether it wrote no event for `stall_s`."""
    begin = latest = time.monotonic()
    size = 0
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            pytest.wait(_POLL_S)
            return False
        now = time.monotonic()
        if (current := events.stat().st_size) != size:
            size, latest = current, now
        if now > latest + stall_s:
            return True
        if now > begin + limit_s:
            return False


def _failure(events: Path, code: int, stalled: bool, log: Path) -> Failure | None:
    """Return the failure that `events` tell of, or None, after pytest has ended with `code`."""
    running = COLLECTION
    for line in events.read_text().splitlines():
        event, test, *message = json.loads(line)
        if event == "failed":
            how = "time limit" if message[0].startswith(_TIMEOUT) or f": {_TIMEOUT}" in message[0] else "failed"
            return Failure(test, how, message[0])
        running = test
    if stalled:
        return Failure(running, "time limit", "pytest made no progress")
    if code == -signal.SIGKILL or code in _GOOD_CODES:  # killed: the limit of the run
        return None
    tail = log.read_text(errors="replace").strip().splitlines()[-1:]
    return Failure(running, "crash", f"pytest ended with code {code}: {''.join(tail)}")
