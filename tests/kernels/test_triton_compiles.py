"""Every Triton kernel compiles for GPUs and fits into their shared memory; the interpreter tests neither."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("triton")

from vllm_mp.testing.compiled_kernels import _too_early

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
    ("decode", "_merge_kernel"): Bound(registers=40, loop=160, programs=12),
    ("decode-fp8", "_decode_kernel"): Bound(registers=168, loop=780, programs=3),
    ("decode-fp8", "_merge_kernel"): Bound(registers=40, loop=160, programs=12),
    ("linear", "_few_rows_kernel"): Bound(registers=128, loop=190, programs=2),
    ("linear-fp8", "_few_rows_kernel"): Bound(registers=128, loop=460, programs=2),
    ("linear-fp8-blocks", "_few_rows_kernel"): Bound(registers=150, loop=330, programs=3),
    ("mixed", "_decode_kernel"): Bound(registers=168, loop=470, programs=3),
    ("mixed", "_merge_kernel"): Bound(registers=48, loop=160, programs=10),
    ("mixed", "_prefill_kernel"): Bound(registers=255, loop=1080, programs=1),
    ("mixed-fp8", "_decode_kernel"): Bound(registers=168, loop=790, programs=3),
    ("mixed-fp8", "_merge_kernel"): Bound(registers=48, loop=160, programs=10),
    ("mixed-fp8", "_prefill_kernel"): Bound(registers=255, loop=1080, programs=1),
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


ROUNDED = ("rotary", "rotary-fp8", "quantize", "linear-fp8-64", "linear-fp8-2048")
ORDERED = ("linear", "linear-fp8", "linear-fp8-blocks", "norm", "silu", "quantize")
"""Launches of kernels that start early, and of those before them."""


@pytest.fixture(scope="module")
def hopper():
    """A function that returns what is known of the code for Hopper of some launches, which are all compiled once."""
    launches = {*(launch for launch, _ in BOUNDS), *ROUNDED, *ORDERED}
    found = run_compiler(str(REPORT), "--json", "--processes", "1", "--only", *sorted(launches))
    return lambda names: [code for code in found if code["launch"] in names]


@pytest.mark.extended
def test_code_for_hopper_stays_within_its_bounds(hopper):
    found = hopper({launch for launch, _ in BOUNDS})
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


@pytest.mark.extended
def test_code_whose_results_equal_those_of_a_cpu_rounds_as_a_cpu_does(hopper):
    codes = {}
    for code in hopper(ROUNDED):
        codes.setdefault(code["kernel"], []).append(code)
    assert all(code["fused"] == 0 for code in codes["_rotary_write_kernel"])
    assert all(code["approximate"] == 0 for code in codes["_quantize_kernel"])
    # Each product of a step is added in float32, not by the tensor cores: 32 or 64 elements of a thread.
    assert all(code["additions"] >= 32 for code in codes["_product_kernel"])


@pytest.mark.extended
def test_products_that_start_early_wait_for_the_kernel_before_ahead_of_any_access(hopper):
    found = hopper(ORDERED)
    assert {code["launch"] for code in found} == {*ORDERED}
    for code in found:
        assert code["starts_early"] == (code["kernel"] == "_few_rows_kernel"), code
        assert (code["prefetches"] > 0) == code["starts_early"], code
        assert code["too_early"] == [], code
    older = run_compiler(str(REPORT), "--json", "--processes", "1", "--capability", "8.6", "--only", "linear", "norm")
    assert not any(code["starts_early"] or code["prefetches"] for code in older)


def test_access_or_branch_before_the_wait_for_the_kernel_before_is_found():
    ahead = ["S2R", "LDC", "CCTL.E.PF2"]
    assert _too_early([*ahead, "ACQBULK", "LDG.E.128", "EXIT"]) == []
    for operation in ("LDG.E.128", "LDGSTS.E.BYPASS.128", "STG.E", "STS.128", "ATOMG.E.ADD", "BRA", "EXIT"):
        assert _too_early([*ahead, operation, "ACQBULK"]) == [operation]
    assert _too_early([*ahead, "LDG.E", "EXIT"]) == ["LDG.E", "EXIT"], "it never waits"


MEASURED_STEPS_US = {"bf16": 1e6 / 209.7, "fp8": 1e6 / 283.3, "qwen3-0.6b": 1e6 / 745.0}
"""A step of one stream on an H200 (docs/figures/gpu.md), by model of tools/gpu/decode_estimate.py."""


@pytest.mark.slow
def test_estimate_of_a_step_gives_what_a_device_measured():
    found = run_compiler(str(ESTIMATE))
    assert set(found) == set(MEASURED_STEPS_US)
    for model, measured in MEASURED_STEPS_US.items():
        assert 0.9 * measured <= found[model]["in_turn"]["step_us"] <= 1.05 * measured, model
        assert found[model]["starting_early"]["step_us"] < found[model]["in_turn"]["step_us"], model


@pytest.mark.slow
def test_compiled_launches_take_the_shared_memory_that_was_computed():
    """Products of few rows take no more than what decides about their stages; others at least what refuses them."""
    found = run_compiler("-m", "support.shared_memory")
    assert {kind for _, kind, *_ in found} == {"linear", "decode", "prefill", "fp8", "lora_shrink"}
    for capability, kind, options, computed, compiled in found:
        case = capability, kind, options, computed, compiled
        if kind == "linear":
            assert 0.4 * computed <= compiled <= computed, case
            assert compiled >= 0.97 * computed or options["num_stages"] == 1, case
        else:
            assert computed <= compiled, case


@pytest.mark.timeout(900)  # it compiles for minutes, and longer beside other tests
@pytest.mark.slow
def test_every_kernel_compiles_and_fits_into_shared_memory():
    compiled = run_compiler("-m", "support.gpu_compiler")
    for capability, limit in SHARED_BYTES.items():
        shared = {(kernel, size) for *at, kernel, size in compiled if tuple(at) == capability}
        assert {kernel for kernel, _ in shared} == EXPECTED[capability]
        assert max(size for _, size in shared) <= limit, shared
