"""Shared by tests and tools: engines and models to test, and the methods by which they find errors.

`engines` runs small real engines and standalone cores, `random_models` saves small models of every architecture, and
`prompts` holds prompts of many kinds. `greedy_parity` checks greedy outputs against transformers, `differential` checks
random requests in a batch against the same requests alone, `faults` checks streams while faults strike the core, and
`fuzzing` sends hostile frames. `cluster` simulates the routing over many cores. Nothing here is part of the wheel.
"""

from vllm_mp.testing.engines import (
    ENGINE,
    answer,
    eventually,
    greedy,
    is_empty,
    make_keys,
    num_waiting_is,
    rest,
    running_engine,
    standalone_core,
)

__all__ = [
    "ENGINE",
    "answer",
    "eventually",
    "greedy",
    "is_empty",
    "make_keys",
    "num_waiting_is",
    "rest",
    "running_engine",
    "standalone_core",
]
