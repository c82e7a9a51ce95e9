"""tools/speed/mixture_speed.py, run as a user runs it, with a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_mp.testing.random_models import CONFIGS, save_config

TOOL = Path(__file__).resolve().parents[3] / "tools" / "speed" / "mixture_speed.py"


@pytest.mark.extended
def test_every_step_has_a_figure_with_fused_layers_and_by_operation(tmp_path):
    config = CONFIGS["mixtral"]
    config.architectures = ["MixtralForCausalLM"]
    save_config(config, tmp_path)
    sizes = {"weights": "bfloat16", "batches": 3, "context": 8, "prompts": 5, "rounds": 2, "seconds": 0}
    arguments = [f"--{name}={value}" for name, value in sizes.items()]
    done = subprocess.run(
        [sys.executable, str(TOOL), "--folder", str(tmp_path), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    [steps] = json.loads(done.stdout).values()
    assert list(steps) == ["decode, 3 streams", "prompt of 5 tokens"]
    for ways in steps.values():
        assert list(ways) == ["fused", "by operation"]
        assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in ways.values())
