"""The stages of tools/gpu_check.py, in the order in which they are worth running, and the calls that divide them."""

from typing import NamedTuple

from vllm_mp.testing.measuring.engine_speed import Workload


class Stage(NamedTuple):
    """A share of the check."""

    purpose: str
    parts: tuple[str, ...] = ()
    """Parts of the check, without engines, which name their stages themselves."""
    tests: tuple[str, ...] = ()
    """Files in tests/gpu."""


STAGES = {
    "kernels": Stage(
        "the kernels against their definitions, and small engines against transformers, also with CUDA graphs",
        tests=("test_triton_kernels", "test_fp8", "test_attention_backends", "test_parity", "test_cuda_graphs"),
    ),
    "fp8": Stage("attention, and a model of 8B parameters in 8-bit floats", ("attention",)),
    "bf16": Stage("the same model in bfloat16"),
    "small": Stage("a model of 0.6B parameters"),
    "linear": Stage("matrix products of the 8B model beside torch's own", ("linear",)),
    "device": Stage("sleep, and deaths of the core on the device", tests=("test_sleep", "test_core_death")),
    "devices": Stage("one model on all devices of the machine", ("devices",), ("test_several_devices",)),
    "tune_attention": Stage("launches of attention for decodes, tuned for this device", ("tune_attention",)),
    "tune_products": Stage("launches of matrix products of the 8B model, tuned beside torch's", ("tune_products",)),
}


CALLS = {"first": ("kernels",), "second": ("small", "bf16", "fp8", "linear", "device")}
"""The stages of two calls of `CALL_BUDGET_S` seconds each. A third call, after them, runs what they had no time for."""
CALL_BUDGET_S = 280


def parts_of(name: str, workload: Workload) -> list[str]:
    """Return the parts of a stage, tests first."""
    stage = STAGES[name]
    engines = [engine for engine, subject in workload.models.items() if name in subject.stages]
    return [*["tests"] * bool(stage.tests), *stage.parts, *engines]


def test_files(name: str) -> list[str]:
    """Return the files with the tests of a stage, relative to the repository."""
    return [f"tests/gpu/{test}.py" for test in STAGES[name].tests]
