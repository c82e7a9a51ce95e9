"""The builds of the C++ kernels that this processor runs."""

import shutil

import pytest
import torch

from vllm_mp.cpu_info import runnable_builds
from vllm_mp.kernels import ops
from vllm_mp.kernels.cpu.library import load


@pytest.fixture(params=runnable_builds())
def build(request, monkeypatch):
    found = load(request.param)
    if found is None and shutil.which("g++") is None:
        pytest.skip("no compiler is installed, so the kernels are not built")
    assert found is not None, "the kernels are not built although a compiler is installed"
    monkeypatch.setattr(ops, "library", lambda: found)
    torch.manual_seed(0)
    return found
