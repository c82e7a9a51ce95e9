"""The wheels, installed in empty environments outside the repository."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_mp.testing.engines import standalone_core

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_wheel_serves_from_an_empty_environment():
    environment = {**os.environ, "VLLM_MP_BUILDS": "native"}  # the other builds take minutes to compile
    done = subprocess.run(
        [sys.executable, ROOT / "tools/check_wheel.py"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "the wheel serves"
    assert re.search(r"^built in \d+ s\nthe wheel has \d+\.\d MB$", done.stdout, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_wheel_of_the_client_connects_to_a_core_and_needs_no_torch(tmp_path: Path, default_model: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)

    built = run(sys.executable, ROOT / "tools/build_client_wheel.py", tmp_path)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("vllm_mp_client-*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    installed = run(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel)
    assert installed.returncode == 0, installed.stderr
    client = tmp_path / "venv/bin/vllm-mp"
    address = f"ipc://{tmp_path}/core.sock"
    with standalone_core(default_model, address) as core:
        assert core.stderr is not None
        next(line for line in core.stderr if "listening on" in line)
        answer = run(client, "generate", "--connect", address, "--temperature", "0", "--max-tokens", "4", "The capital")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.strip()
    assert run(python, "-c", "import torch").returncode != 0
    refused = run(client, "generate", "The capital")
    assert refused.returncode == 2
    assert "needs the engine, and this installation is a client without vllm_mp.core" in refused.stderr
