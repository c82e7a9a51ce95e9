"""Every Triton kernel compiles for GPUs and fits into their shared memory; the interpreter tests neither."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

TESTS = Path(__file__).parents[1]

SHARED_BYTES = {(9, 0): 227 * 1024, (8, 6): 99 * 1024, (8, 9): 99 * 1024}
"""The shared memory of one program: on Hopper, on the smallest supported GPU, and on the smallest with 8-bit floats."""
KERNELS = {
    "_activation_kernel",
    "_decode_kernel",
    "_depth_kernel",
    "_expand_kernel",
    "_highest_kernel",
    "_layer_norm_kernel",
    "_merge_kernel",
    "_part_highest_kernel",
    "_prefill_kernel",
    "_rms_norm_kernel",
    "_rotary_kernel",
    "_rotary_write_kernel",
    "_sample_kernel",
    "_shrink_kernel",
    "_token_mask_kernel",
    "_write_kernel",
}
FLOAT8_KERNELS = {"_add_kernel", "_product_kernel", "_quantize_kernel"}
FLOAT8_CACHE_KERNELS = {"_decode_kernel", "_merge_kernel", "_prefill_kernel", "_rotary_write_kernel", "_write_kernel"}
EXPECTED = {
    (9, 0): KERNELS | FLOAT8_KERNELS,
    (8, 6): KERNELS,
    (8, 9): FLOAT8_KERNELS | FLOAT8_CACHE_KERNELS,
}


ATTENTION_ON_HOPPER = """
import torch
from support import gpu_compiler

gpu_compiler.TABLES, gpu_compiler.FLOAT8_TABLES = {(9, 0): gpu_compiler.TABLES[9, 0]}, {}
gpu_compiler.call_floats = lambda: gpu_compiler.attend(torch.bfloat16, 128, 128, None, None)
gpu_compiler.main()
"""


def run_compiler(*arguments):
    """Run Python without the interpreter of Triton, with the JSON that it prints as the result."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment, cwd=TESTS
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def test_attention_compiles_for_hopper_and_fits_into_shared_memory():
    compiled = run_compiler("-c", ATTENTION_ON_HOPPER)
    assert {kernel for *_, kernel, _ in compiled} == {"_decode_kernel", "_merge_kernel", "_prefill_kernel"}
    assert max(size for *_, size in compiled) <= SHARED_BYTES[9, 0]


@pytest.mark.timeout(900)  # it compiles for minutes, and longer beside other tests
@pytest.mark.slow
def test_every_kernel_compiles_and_fits_into_shared_memory():
    compiled = run_compiler("-m", "support.gpu_compiler")
    for capability, limit in SHARED_BYTES.items():
        shared = {(kernel, size) for *at, kernel, size in compiled if tuple(at) == capability}
        assert {kernel for kernel, _ in shared} == EXPECTED[capability]
        assert max(size for _, size in shared) <= limit, shared
