"""The wheel, installed in an empty environment outside the repository."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools/check_wheel.py"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_wheel_serves_from_an_empty_environment():
    environment = {**os.environ, "VLLM_MP_BUILDS": "native"}  # the other builds take minutes to compile
    done = subprocess.run([sys.executable, TOOL], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "the wheel serves"
    assert re.search(r"^built in \d+ s\nthe wheel has \d+\.\d MB$", done.stdout, re.MULTILINE)
