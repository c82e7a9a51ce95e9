"""Every build of the C++ kernels that this processor runs, and the build with a model of the tile instructions."""

import shutil

import pytest
import torch

from vllm_mp.cpu_info import runnable_builds
from vllm_mp.kernels import ops
from vllm_mp.kernels.cpu.library import load

_FASTEST, *_OTHERS = runnable_builds()


@pytest.fixture(params=[_FASTEST, *(pytest.param(name, marks=pytest.mark.slow) for name in _OTHERS), "amx_model"])
def build(request, monkeypatch):
    found = load(request.param)
    if found is None and shutil.which("g++") is None:
        pytest.skip("no compiler is installed, so the kernels are not built")
    assert found is not None, "not built although a compiler is installed: VLLM_MP_TILE_MODEL=1 setup.py build_ext"
    monkeypatch.setattr(ops, "library", lambda: found)
    torch.manual_seed(0)
    return found
