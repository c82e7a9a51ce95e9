"""tools/speed/lora_speed.py, run as a user runs it, with a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_mp.testing.random_models import CONFIGS, save_random_model

TOOL = Path(__file__).resolve().parents[3] / "tools" / "speed" / "lora_speed.py"


@pytest.mark.extended
def test_every_step_has_a_figure_without_an_adapter_with_one_and_with_several(tmp_path):
    save_random_model(CONFIGS["llama"], tmp_path)
    sizes = {"rounds": 1, "batch": 4, "context": 8, "prompts": 2, "prompt-len": 5, "adapters": 3, "rank": 2}
    arguments = [f"--{name}={value}" for name, value in sizes.items()]
    done = subprocess.run(
        [sys.executable, str(TOOL), "--model", str(tmp_path), "--device=cpu", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    records = json.loads(done.stdout)
    assert [(record["step"], record["adapters"]) for record in records] == [
        (step, adapters) for step in ("decode", "prefill") for adapters in (0, 1, 3)
    ]
    assert all(record["seconds"] > 0 for record in records)
    assert records[0]["ratio"] == records[3]["ratio"] == 1
