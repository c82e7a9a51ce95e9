"""The time that a call takes on the host."""

import statistics
import time
from collections.abc import Callable
from typing import Final

import torch

_LEAST_CALLS: Final = 5


@torch.inference_mode()
def median_ms(call: Callable[[], object], seconds: float, num_warm: int) -> float:
    """Return the median milliseconds of the calls of `seconds` seconds, after `num_warm` calls to warm up."""
    spent: list[float] = []
    end = time.perf_counter() + seconds
    while len(spent) < num_warm + _LEAST_CALLS or time.perf_counter() < end:
        begun = time.perf_counter()
        call()
        spent.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(spent[num_warm:])
