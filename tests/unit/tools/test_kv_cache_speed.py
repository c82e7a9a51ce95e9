"""tools/speed/kv_cache_speed.py, run as a user runs it, with a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_mp.testing.random_models import CONFIGS, save_config

TOOL = Path(__file__).resolve().parents[3] / "tools" / "speed" / "kv_cache_speed.py"


@pytest.mark.extended
def test_every_decode_has_a_figure_for_each_type_of_cache(tmp_path):
    config = CONFIGS["llama"]
    config.architectures = ["LlamaForCausalLM"]
    save_config(config, tmp_path)
    sizes = {"contexts": 20, "streams": 3, "rounds": 2, "seconds": 0, "dtype": "bfloat16"}
    arguments = [f"--{name}={value}" for name, value in sizes.items()]
    done = subprocess.run(
        [sys.executable, str(TOOL), "--folder", str(tmp_path), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    [(name, times)] = json.loads(done.stdout).items()
    assert name == "3 streams, context 20"
    assert list(times) == ["bfloat16", "int8"]
    assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in times.values())
