"""tools/recovery_cost.py as a user runs it, in a short form."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "recovery_cost.py"


def test_the_share_is_that_of_the_page_and_the_beats_in_the_step():
    command = [sys.executable, str(TOOL), "--batches", "1", "2", "--output-len", "8", "--rounds", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    records = json.loads(done.stdout)
    assert [one["requests"] for one in records] == [1, 2]
    for one in records:
        assert min(one["page_us"], one["beats_us"]) > 0
        share = (one["page_us"] + one["beats_us"]) / one["step_us"]
        assert one["percent_of_step"] == pytest.approx(100 * share)
