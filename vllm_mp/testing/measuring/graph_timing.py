"""The time of operations on a device."""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

_GRAPH_MS = 10
"""The device time of the captured graph, which `do_bench_cudagraph` replays ten times."""
_ROUNDS = 5
"""The rounds on a CPU, after one to warm up."""


def seconds(run: Callable[[], Tensor], device: torch.device) -> float:
    """Return the seconds of one run, the median of many; on a GPU, of a captured graph, so launches do not count."""
    if device.type == "cuda":
        from triton.testing import do_bench_cudagraph

        run()  # compiles, which a capture does not allow
        return float(do_bench_cudagraph(run, rep=_GRAPH_MS, return_mode="median")) / 1e3
    spent = []
    for _ in range(1 + _ROUNDS):
        started = time.perf_counter()
        run()
        spent.append(time.perf_counter() - started)
    return statistics.median(spent[1:])
