"""tools/speed/kernels/sampling_speed.py, run as a user runs it, with a tiny vocabulary."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[3] / "tools" / "speed" / "kernels" / "sampling_speed.py"


@pytest.mark.extended
def test_every_case_has_a_figure_for_the_kernels_and_for_torch():
    sizes = {"vocab-size": 300, "rows": 2, "rounds": 2, "seconds": 0}
    arguments = [f"--{name}={value}" for name, value in sizes.items()]
    done = subprocess.run([sys.executable, str(TOOL), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"2 rows, temperature", "2 rows, top_p 0.95", "2 rows, 5 log-probabilities"} <= found.keys()
    for times in found.values():
        assert list(times) == ["C++", "torch"]
        assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in times.values())
