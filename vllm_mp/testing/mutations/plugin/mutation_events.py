"""A plugin of pytest that writes the begin and the failure of each test to a file at once, so that a hang has a name.

Each line is a JSON list: "start" and the test, or "failed", the test and the last line of the error. A file that cannot
be collected counts as a test. The environment variable `MUTATION_EVENTS` names the file.
"""

import json
import os
from typing import Any

EVENTS_VARIABLE = "MUTATION_EVENTS"


def _write(*event: str) -> None:
    with open(os.environ[EVENTS_VARIABLE], "a") as file:
        file.write(json.dumps(event) + "\n")


def _last_line(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(report.longrepr if crash is None else crash.message).strip().splitlines()
    return lines[0 if crash is not None else -1] if lines else ""


def pytest_runtest_logstart(nodeid: str) -> None:
    _write("start", nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    if report.failed:
        _write("failed", report.nodeid, _last_line(report))


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        _write("failed", report.nodeid, _last_line(report))
