"""Every Triton kernel compiles for GPUs and fits into their shared memory; the interpreter tests neither."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("triton")

TESTS = Path(__file__).parents[1]
REPORT = TESTS.parent / "tools" / "gpu" / "kernel_report.py"
ESTIMATE = TESTS.parent / "tools" / "gpu" / "decode_estimate.py"

SHARED_BYTES = {(9, 0): 227 * 1024, (8, 6): 99 * 1024, (8, 9): 99 * 1024}
"""The shared memory of one program: on Hopper, on the smallest supported GPU, and on the smallest with 8-bit floats."""
KERNELS = {
    "_activation_kernel",
    "_add_kernel",
    "_copy_step_kernel",
    "_decode_kernel",
    "_depth_kernel",
    "_expand_kernel",
    "_few_rows_kernel",
    "_fill_awaited_kernel",
    "_highest_kernel",
    "_layer_norm_kernel",
    "_list_kernel",
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
FLOAT8_KERNELS = {
    "_activation_kernel",
    "_add_kernel",
    "_few_rows_kernel",
    "_product_kernel",
    "_quantize_kernel",
    "_rms_norm_kernel",
}
FLOAT8_CACHE_KERNELS = {"_decode_kernel", "_merge_kernel", "_prefill_kernel", "_rotary_write_kernel", "_write_kernel"}
EXPECTED = {
    (9, 0): KERNELS | FLOAT8_KERNELS,
    (8, 6): KERNELS,
    (8, 9): FLOAT8_KERNELS | FLOAT8_CACHE_KERNELS,
}


class Bound(NamedTuple):
    """What the code of a kernel may take of a GPU of compute capability 9.0."""

    registers: int
    loop: int  # instructions
    programs: int  # the least number that a multiprocessor must hold at a time


BOUNDS = {
    ("decode", "_decode_kernel"): Bound(registers=168, loop=470, programs=3),
    ("decode", "_merge_kernel"): Bound(registers=40, loop=0, programs=16),
    ("decode-fp8", "_decode_kernel"): Bound(registers=168, loop=780, programs=3),
    ("decode-fp8", "_merge_kernel"): Bound(registers=40, loop=0, programs=16),
    ("linear", "_few_rows_kernel"): Bound(registers=128, loop=190, programs=2),
    ("linear-fp8", "_few_rows_kernel"): Bound(registers=128, loop=440, programs=2),
    ("linear-fp8-blocks", "_few_rows_kernel"): Bound(registers=150, loop=330, programs=3),
    ("prefill", "_prefill_kernel"): Bound(registers=245, loop=1080, programs=1),
    ("sample", "_part_highest_kernel"): Bound(registers=48, loop=0, programs=5),
    ("sample", "_highest_kernel"): Bound(registers=32, loop=0, programs=16),
    ("sample", "_depth_kernel"): Bound(registers=48, loop=0, programs=5),
    ("sample", "_list_kernel"): Bound(registers=128, loop=0, programs=2),
    ("sample", "_sample_kernel"): Bound(registers=128, loop=240, programs=2),
    ("step", "_copy_step_kernel"): Bound(registers=64, loop=0, programs=8),
}
"""By launch of tools/gpu/kernel_report.py and kernel. Triton 3.6 and 3.9 both stay within them."""


def run_compiler(*arguments):
    """Run Python without the interpreter of Triton, with the JSON that it prints as the result."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment, cwd=TESTS
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


@pytest.mark.extended
def test_code_for_hopper_stays_within_its_bounds():
    found = run_compiler(str(REPORT), "--json", "--processes", "1", "--only", *{launch for launch, _ in BOUNDS})
    assert {(code["launch"], code["kernel"]) for code in found} == set(BOUNDS)
    for code in found:
        bound = BOUNDS[code["launch"], code["kernel"]]
        assert code["spills"] == code["unswizzled"] == 0, code
        assert "8" not in code["shared_loads"], code
        assert {load for load in code["global_loads"] if "async" in load} <= {"async 128"}, code
        assert code["shared"] <= SHARED_BYTES[9, 0], code
        assert code["registers"] <= bound.registers, code
        assert code["loop"] <= bound.loop, code
        assert code["programs"] >= bound.programs, code


@pytest.mark.slow
def test_estimated_step_takes_little_longer_than_its_weights():
    found = run_compiler(str(ESTIMATE))
    assert 0.8 <= found["bf16"]["share_of_bandwidth"] < 1
    assert 0.65 <= found["fp8"]["share_of_bandwidth"] < 1
    assert found["fp8"]["step_us"] < found["bf16"]["step_us"]


@pytest.mark.timeout(900)  # it compiles for minutes, and longer beside other tests
@pytest.mark.slow
def test_every_kernel_compiles_and_fits_into_shared_memory():
    compiled = run_compiler("-m", "support.gpu_compiler")
    for capability, limit in SHARED_BYTES.items():
        shared = {(kernel, size) for *at, kernel, size in compiled if tuple(at) == capability}
        assert {kernel for kernel, _ in shared} == EXPECTED[capability]
        assert max(size for _, size in shared) <= limit, shared
