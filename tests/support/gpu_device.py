"""The device of the tests in `tests/gpu`, and the engine options that they share.

They run on CUDA; VLLM_MP_TEST_DEVICE=cpu runs them on a CPU, which proves the tests themselves.
"""

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

CACHE_BYTES = 2**29
OPTIONS = {
    "device": DEVICE,
    "num_threads": 1,
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "max_model_len": 2048,
    "kv_cache_memory_bytes": CACHE_BYTES,
}
"""Engine options of tests that watch the device's memory."""
SLACK_BYTES = 64 * 2**20
"""The tolerance of two readings of `device_memory_in_use` in the same state."""


def device_memory_in_use() -> int:
    """Return the bytes in use on the device, read by a separate process; on a CPU, those in use by our children."""
    if DEVICE == "cpu":
        return sum(child.memory_info().rss for child in psutil.Process().children(recursive=True))
    code = "import torch; free, total = torch.cuda.mem_get_info(); print(total - free)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return int(done.stdout)
