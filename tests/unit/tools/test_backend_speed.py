"""tools/speed/backend_speed.py, run as a user runs it, with a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_mp.testing.random_models import CONFIGS, save_random_model

TOOL = Path(__file__).resolve().parents[3] / "tools" / "speed" / "backend_speed.py"


@pytest.mark.slow
def test_both_backends_have_a_rate_for_each_round_and_number_of_streams(tmp_path):
    save_random_model(CONFIGS["gemma3"], tmp_path)
    sizes = {"batches": 2, "rounds": 2, "prompt-len": 3, "output-len": 20, "num-threads": 1, "cache-bytes": 2**20}
    arguments = [f"--{name}={value}" for name, value in sizes.items()]
    done = subprocess.run(
        [sys.executable, str(TOOL), f"--folder={tmp_path}", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (rates,) = json.loads(done.stdout).values()
    assert list(rates) == ["native", "transformers"]
    assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in rates.values())
