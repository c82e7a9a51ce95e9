"""The environment of a core process."""

import os
from pathlib import Path


def core_environment() -> dict[str, str]:
    """Return the environment of a core process: a copy of this process's, with up to two more variables.

    THP_MEM_ALLOC_ENABLE: large tensors lie in huge pages, which avoids a walk through the page tables for every 4 KiB
    of weights and KV cache. Set it to 0 to switch that off.

    GOMP_SPINCOUNT: OpenMP's threads spin only briefly before they sleep. By default they spin for milliseconds; other
    work on the same processor cores, such as the client's, then makes a step take many times as long. The chosen time
    just bridges the gap between two layers: it costs next to nothing on a quiet machine, while with a shorter time
    threads would sleep and be woken in each layer. Set it to choose another time, or set OMP_WAIT_POLICY=passive if
    processor cores are shared.
    """
    usual = {"THP_MEM_ALLOC_ENABLE": "1"}
    if "OMP_WAIT_POLICY" not in os.environ:
        usual["GOMP_SPINCOUNT"] = "50000"
    return usual | os.environ


def package_path() -> dict[str, str]:
    """Return the environment variable with which a Python process finds this package; none if it is installed."""
    parent = Path(__file__).resolve().parents[2]
    if {"site-packages", "dist-packages"} & set(parent.parts):
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(parent), os.environ.get("PYTHONPATH")]))}
