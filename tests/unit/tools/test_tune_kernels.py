"""tools/tune_kernels.py, run in Triton's interpreter, and the effect of its file on the kernels."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from vllm_mp.kernels.triton import launch

TOOL = Path(__file__).resolve().parents[3] / "tools" / "tune_kernels.py"


@pytest.mark.slow
def test_tool_saves_options_of_every_kernel_that_serves_a_model(tmp_path):
    out = tmp_path / "tuned.json"
    command = [sys.executable, str(TOOL), "--device", "cpu", "--quick", "--out", str(out)]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert set(found) == {key for key in launch._HOPPER if "/32/" not in key}
    for key, options in found.items():
        assert set(options) <= set(launch._HOPPER[key])


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(launch, "tuned_file", lambda capability: tmp_path / "sm_{}{}.json".format(*capability))
    launch._table.cache_clear()
    yield tmp_path / "sm_90.json"
    launch._table.cache_clear()


def test_measured_options_replace_the_built_in_options(hopper):
    device = torch.device("cuda", 0)
    assert launch.table(device) == launch._HOPPER
    launch._table.cache_clear()
    hopper.write_text(json.dumps({"merge": {"num_warps": 2}}))
    assert launch.options("merge", device) == {"num_warps": 2}
    assert launch.options("sample", device) == launch._HOPPER["sample"]
    assert launch._HOPPER["merge"] != {"num_warps": 2}


@pytest.mark.parametrize(
    ("num_programs", "context", "expected"),
    [(8, 100, 1), (8, 1000, 4), (8, 100_000, 33), (8, 2**20, 64), (2048, 1000, 1), (2048, 32_768, 4)],
)
def test_decode_is_split_so_that_the_gpu_is_busy_and_no_split_is_too_long(
    hopper, monkeypatch, num_programs, context, expected
):
    monkeypatch.setattr(launch, "_num_processors", lambda *_: 132)
    assert launch.num_splits(num_programs, context, torch.device("cuda", 0)) == expected
