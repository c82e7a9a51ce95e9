"""tools/speed/recovery_cost.py, run as a user runs it, with few requests."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("forked_programs")

TOOL = Path(__file__).resolve().parents[2] / "tools" / "speed" / "recovery_cost.py"


@pytest.mark.slow
def test_tool_reports_the_cost_of_page_and_heartbeats_as_a_share_of_a_step():
    command = [sys.executable, str(TOOL), "--batches", "1", "2", "--output-len", "8", "--rounds", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    records = json.loads(done.stdout)
    assert [record["requests"] for record in records] == [1, 2]
    for record in records:
        assert min(record["page_us"], record["beats_us"]) > 0
        share = (record["page_us"] + record["beats_us"]) / record["step_us"]
        assert record["percent_of_step"] == pytest.approx(100 * share)
