"""tools/speed/prompts/prefill_flow.py, run as a user runs it, in its short form."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("forked_programs")

TOOL = Path(__file__).resolve().parents[2] / "tools" / "speed" / "prompts" / "prefill_flow.py"


@pytest.mark.slow
def test_tool_reports_all_figures_with_their_goals():
    command = [sys.executable, str(TOOL), "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    sharing, flow, pace = json.loads(done.stdout)
    assert (sharing["name"], sharing["goal"]) == ("sharing", 0.15)
    assert (flow["name"], flow["goal"]) == ("flow", 2)
    assert (pace["name"], pace["goal"]) == ("pace", 3)
    for record in (sharing, flow, pace):
        assert len(record["ratios"]) == 2
        assert min(record["ratios"]) <= record["ratio"] <= max(record["ratios"])
        assert min(record["base_s"], record["measured_s"]) > 0
