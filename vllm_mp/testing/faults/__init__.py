"""Faults on running engines, and checks of what users saw.

`baseline` knows the outputs of an undisturbed engine, `playing` plays one of the `scenarios` against it, and `soak`
kills the core again and again. `parallel_soak` kills one of several cores, and `shared_soak` a core that several
clients share, beside a `hostile_client`. `load` holds the requests; `comparison` and `leaks` check the promises.
"""

from vllm_mp.testing.faults.baseline import Baseline
from vllm_mp.testing.faults.load import every_case
from vllm_mp.testing.faults.parallel_soak import ParallelSoakResult, run_parallel_soak
from vllm_mp.testing.faults.playing import Scenario, ScenarioResult, play
from vllm_mp.testing.faults.shared_scenarios import SCENARIOS
from vllm_mp.testing.faults.shared_soak import run_shared_soak
from vllm_mp.testing.faults.soak import SoakResult, run_soak

__all__ = [
    "SCENARIOS",
    "Baseline",
    "ParallelSoakResult",
    "Scenario",
    "ScenarioResult",
    "SoakResult",
    "every_case",
    "play",
    "run_parallel_soak",
    "run_shared_soak",
    "run_soak",
]
