"""Where the tests of `tests/gpu` run: on CUDA, or where VLLM_MP_TEST_DEVICE says, which lets a CPU prove the tests."""

import os

import pytest
import torch

DEVICE = os.environ.get("VLLM_MP_TEST_DEVICE", "cuda")

ON_DEVICE = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cuda" and not torch.cuda.is_available(),
        reason="PyTorch finds no CUDA device (VLLM_MP_TEST_DEVICE=cpu runs these tests on the CPU)",
    ),
]
"""For a module's `pytestmark`."""
