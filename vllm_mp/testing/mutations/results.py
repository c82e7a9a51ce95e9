"""The results of trials: the JSON file that keeps them, and the tables that show them."""

import datetime
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vllm_mp.testing.mutations.mutation import Mutation
from vllm_mp.testing.mutations.trial import EXPRESSIONS, Outcome

TITLES = {"named": "named tests", "default": "default set", "all": "whole set", "slow": "with slow tests"}
"""Column titles by set of tests."""
_BEGIN = "<!-- the tables: tools/mutations page -->"
"""Ends the part of the page that is written by hand."""
_ORDER = ("default", "all", "slow", "named")
"""Sets in the order in which a table names their failed test."""

Results = dict[str, dict[str, dict[str, Any]]]
"""The record of each outcome by mutation and set of tests."""


class ResultsFile:
    """A JSON file of results, which keeps what it had of other mutations and sets."""

    def __init__(self, path: Path | None) -> None:
        """`path` None: the results are not kept."""
        self._path = path
        self.results: Results = {}
        if path is not None and path.exists():
            self.results = json.loads(path.read_text())

    def add(self, mutation: Mutation, test_set: str, outcome: Outcome, commit: str | None) -> dict[str, Any]:
        """Write an outcome to the file; return its record."""
        failure = outcome.failure
        record: dict[str, Any] = {
            "caught": failure is not None,
            "how": None if failure is None else failure.how,
            "test": None if failure is None else failure.test,
            "out_of_time": outcome.out_of_time,
            "seconds": outcome.seconds,
            "date": datetime.date.today().isoformat(),
            "commit": commit,
        }
        self.results.setdefault(mutation.name, {})[test_set] = record
        if self._path is not None:
            self._path.write_text(json.dumps(self.results, indent=1, sort_keys=True) + "\n")
        return record

    def catching_tests(self, mutation: Mutation) -> list[str]:
        """Return the test functions that caught a mutation in any set, without their parameters."""
        found = [record["test"] for record in self.results.get(mutation.name, {}).values()]
        return list(dict.fromkeys(test.partition("[")[0] for test in found if test is not None and "::" in test))


def verdict(record: dict[str, Any] | None) -> str:
    """Return the word of a table for a record; None: there is none."""
    if record is None:
        return "–"
    if not record["caught"]:
        return "not decided" if record["out_of_time"] else "**no**"
    return "yes" if record["how"] == "failed" else f"by {record['how']}"


def outcome_table(mutations: Iterable[Mutation], results: Results, test_set: str) -> list[str]:
    """Return the lines of a Markdown table of the outcomes of one set of tests."""
    lines = ["| fault | subject | caught | first test that fails | seconds |", "| --- | --- | --- | --- | --- |"]
    for mutation in mutations:
        record = results[mutation.name][test_set]
        test, seconds = record["test"] or "", record["seconds"]
        lines.append(f"| {mutation.name} | {mutation.subject} | {verdict(record)} | {test} | {seconds:g} |")
    return lines


def totals(mutations: Sequence[Mutation], results: Results, test_sets: Sequence[str]) -> list[str]:
    """Return the lines of a Markdown table of the number of caught mutations by subject and set of tests."""
    subjects = list(dict.fromkeys(mutation.subject for mutation in mutations))
    titles = " | ".join(TITLES[test_set] for test_set in test_sets)
    lines = [f"| subject | faults | {titles} |", "| --- " * (2 + len(test_sets)) + "|"]
    for subject in [*subjects, None]:
        members = [mutation for mutation in mutations if subject in (mutation.subject, None)]
        cells = [_caught(members, results, test_set) for test_set in test_sets]
        lines.append(f"| {subject or '**all**'} | {len(members)} | {' | '.join(cells)} |")
    return lines


def _caught(members: Sequence[Mutation], results: Results, test_set: str) -> str:
    """Return how many of `members` a set of tests caught; fewer trials than members are noted."""
    records = [record for mutation in members if (record := results.get(mutation.name, {}).get(test_set))]
    if not records:
        return "–"
    caught = sum(record["caught"] for record in records)
    return f"{caught} of {len(records)} tried" if len(records) < len(members) else f"{caught}"


def page_with_tables(page: str, mutations: Sequence[Mutation], results: Results) -> str:
    """Return the page of documentation with tables of all results in place of those that it has.

    Raises ValueError if the page has no mark of the place.
    """
    head, mark, _ = page.partition(_BEGIN)
    if not mark:
        raise ValueError(f"the page has no line {_BEGIN!r}, after which the tables stand")
    test_sets = [name for name in EXPRESSIONS if name != "slow" or any(name in found for found in results.values())]
    lines = [head + mark, "", *totals(mutations, results, test_sets)]
    titles = " | ".join(f"caught by {TITLES[test_set]}" for test_set in test_sets)
    for subject in dict.fromkeys(mutation.subject for mutation in mutations):
        lines += ["", f"### {subject[0].upper()}{subject[1:]}", ""]
        lines += [f"| fault, and what a user would see | {titles} | first test that fails |"]
        lines += ["| --- " * (2 + len(test_sets)) + "|"]
        for mutation in mutations:
            if mutation.subject == subject:
                found = results.get(mutation.name, {})
                cells = [verdict(found.get(test_set)) for test_set in test_sets]
                fault = f"**{mutation.name}**: {mutation.effect}"
                lines.append(f"| {fault} | {' | '.join(cells)} | {_first_test(found)} |")
    return "\n".join(lines) + "\n"


def _first_test(found: dict[str, dict[str, Any]]) -> str:
    """Return the test that failed first, without its parameters; it may have another name by now."""
    for test_set in _ORDER:
        test = found.get(test_set, {}).get("test")
        if test is not None:
            file, _, name = test.partition("[")[0].partition("::")
            return f"{name} in {file.rpartition('/')[2]}"
    return ""
