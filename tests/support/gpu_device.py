"""Where the tests of `tests/gpu` run: on CUDA, or where VLLM_MP_TEST_DEVICE says, which lets a CPU prove the tests."""

import os
import subprocess
import sys

import psutil
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


def device_memory_in_use() -> int:
    """Bytes that the device has given away, asked from a process of its own; on a CPU, what our children hold."""
    if DEVICE == "cpu":
        return sum(child.memory_info().rss for child in psutil.Process().children(recursive=True))
    code = "import torch; free, total = torch.cuda.mem_get_info(); print(total - free)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return int(done.stdout)
