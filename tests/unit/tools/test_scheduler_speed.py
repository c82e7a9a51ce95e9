"""tools/speed/scheduler_speed.py, run as a user runs it, in its short form."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[3] / "tools" / "speed" / "scheduler_speed.py"


def run_tool(*arguments):
    done = subprocess.run(
        [sys.executable, str(TOOL), "--quick", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_case_has_figures_and_a_goal():
    records = json.loads(run_tool("--json"))
    cases = [(record["step"], record["requests"], record["context"], record["prefix_hits"]) for record in records]
    assert set(cases) == {
        (step, requests, context, hits)
        for step in ("decode", "admission")
        for requests in (1, 8)
        for context in (32, 128)
        for hits in (False, True)
    }
    assert len(cases) == len(set(cases))
    for record in records:
        assert min(record[f"{part}_us"] for part in ("schedule", "inputs", "update", "total")) > 0
        assert record["goal_us"] == 500 + record["requests"]


@pytest.mark.extended
def test_table_has_a_line_for_each_case():
    head, *lines = run_tool().splitlines()
    assert "goal" in head
    assert len(lines) == 16
