"""Print one summary of several pytest runs that were made side by side, from their JUnit reports.

Usage: run_summary.py [--again] SECONDS {EXIT_CODE REPORT}..., with the exit code of each pytest. Exits with 1 if a test
failed, or if a run was interrupted, selected no test or left no report.

With `--again`, the tests that failed run once more, each alone, if they are few. One that passes then is named as
unstable, and does not make the whole fail: on a small machine under load, a test of processes may fail of that alone.
"""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from heapq import nlargest
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

GPU_TESTS = "tests.gpu."
NEEDS_A_GPU = "need a GPU"
COMPLETE = (0, 1)
"""pytest's exit codes of runs that came to their end: all tests passed, or some failed."""
MAX_AGAIN = 4
"""More failed tests than this are no matter of load."""
MANY_SECONDS = 5
"""A file whose tests take longer may be named among those that take the most time."""
MAX_NAMED_FILES = 8
WHY_INCOMPLETE = {2: "was interrupted", 3: "had an internal error", 4: "had wrong arguments", 5: "selected no test"}


class Summary(NamedTuple):
    """The results of the tests of all runs."""

    num_passed: int
    skipped: Counter[str]
    """Number of skipped tests by reason."""
    failed: list[str]
    """Node ids of the tests that failed, in the order of the reports."""
    unstable: list[str]
    """Node ids of the tests that failed at first, and passed alone."""
    lost: list[str]
    """Why a run counts as failed whatever its tests did: it was interrupted, or left no report."""
    seconds: dict[str, float]
    """The time of the tests of each file."""

    @property
    def has_failed(self) -> bool:
        return bool(self.failed or self.lost)


def summarize(runs: Iterable[tuple[int, Path]]) -> Summary:
    """Read the reports, which pytest wrote with `--junit-xml=REPORT`, beside its exit codes."""
    summary = Summary(0, Counter(), [], [], [], {})
    for exit_code, report in runs:
        if exit_code not in COMPLETE:
            why = WHY_INCOMPLETE.get(exit_code, "ended")
            summary.lost.append(f"the run of {report.name} {why} (pytest's exit code {exit_code})")
        try:
            cases = list(ElementTree.parse(report).iter("testcase"))
        except (OSError, ElementTree.ParseError) as error:
            summary.lost.append(f"no report in {report.name}, so pytest crashed or was killed ({error})")
            continue
        num_failed = len(summary.failed)
        summary = _with_cases(summary, cases)
        if exit_code == 1 and len(summary.failed) == num_failed:
            summary.lost.append(f"the run of {report.name} failed, but its report names no failed test")
    return summary


def run_again(summary: Summary) -> Summary:
    """Run the tests that failed once more, each alone, if they are few; print what pytest prints of them."""
    if len(summary.failed) > MAX_AGAIN:
        return summary
    failed: list[str] = []
    unstable: list[str] = []
    for node_id in summary.failed:
        print(f"== again, alone: {node_id}", flush=True)
        done = subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", node_id], check=False)
        (failed if done.returncode else unstable).append(node_id)
    num_passed = summary.num_passed + len(unstable)
    return summary._replace(num_passed=num_passed, failed=failed, unstable=unstable)


def _with_cases(summary: Summary, cases: list[ElementTree.Element]) -> Summary:
    num_passed = summary.num_passed
    for case in cases:
        skip = case.find("skipped")
        file = _node_id(case).partition("::")[0]
        summary.seconds[file] = summary.seconds.get(file, 0.0) + float(case.get("time", 0))
        if case.find("failure") is not None or case.find("error") is not None:
            # A test that fails and whose fixture fails, too, has two entries in a row.
            if _node_id(case) not in summary.failed[-1:]:
                summary.failed.append(_node_id(case))
        elif skip is not None:
            summary.skipped[_reason(case, skip)] += 1
        else:
            num_passed += 1
    return summary._replace(num_passed=num_passed)


def _node_id(case: ElementTree.Element) -> str:
    """Return pytest's name of the test, or of the file if that could not be collected."""
    if not (module := case.get("classname")):
        return case.get("name", "").replace(".", "/") + ".py"
    *folders, rest = re.split(r"\.(?=test_)", module, maxsplit=1)
    file, *classes = rest.split(".")
    return "::".join([f"{'/'.join(folders).replace('.', '/')}/{file}.py", *classes, case.get("name", "")])


def _reason(case: ElementTree.Element, skip: ElementTree.Element) -> str:
    if case.get("classname", "").startswith(GPU_TESTS):
        return NEEDS_A_GPU
    return skip.get("message", "no reason given")


def lines(summary: Summary, seconds: int) -> list[str]:
    """Return the lines to print: failed tests with the command that runs each alone, skipped tests, the counts."""
    printed = []
    if summary.failed:
        printed += ["Failed; to run each test alone:", *(f"  tools/test '{node_id}'" for node_id in summary.failed)]
    if summary.unstable:
        printed += ["Unstable, failed at first and passed alone:", *(f"  {node_id}" for node_id in summary.unstable)]
    printed += summary.lost
    times = ((time, file) for file, time in summary.seconds.items() if time > MANY_SECONDS)
    if slowest := nlargest(MAX_NAMED_FILES, times):
        printed.append(f"most time, in seconds: {', '.join(f'{file} {time:.0f}' for time, file in slowest)}")
    skipped = f"{summary.skipped.total():,} skipped"
    if summary.skipped:
        reasons = (
            f"{count:,} {reason}" if reason == NEEDS_A_GPU else f"{count:,}: {reason}"
            for reason, count in summary.skipped.most_common()
        )
        skipped += f" ({', '.join(reasons)})"
    # Commas in numbers and "tests passed" keep this line apart from pytest's own, which programs read and add up.
    counts = f"{summary.num_passed:,} tests passed, {skipped}, {len(summary.failed):,} tests failed"
    return [*printed, f"{counts} in {seconds // 60} min {seconds % 60} s"]


def main(arguments: list[str]) -> int:
    """Print the summary; return the exit code."""
    is_again = arguments[0] == "--again"
    seconds, *runs = arguments[is_again:]
    summary = summarize(zip(map(int, runs[::2]), map(Path, runs[1::2]), strict=True))
    if is_again:
        summary = run_again(summary)
    print("\n".join(lines(summary, int(seconds))))
    return 1 if summary.has_failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
