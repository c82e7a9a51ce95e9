"""The random numbers of draws, each a function of a request's seed and the position of its token."""

import numpy as np
import numpy.typing as npt


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the output function of splitmix64 (Steele, Lea and Flood, 2014), a bijection of 64-bit words."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def uniform_draws(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return numbers in [0, 1), float64 [n], each a function of its seed and its output position.

    The numbers have 52 bits, so that their product with a sum in float64 stays below the sum.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        state = _mix(seeds + golden) + (positions.astype(np.uint64) + np.uint64(1)) * golden
        return (_mix(_mix(state)) >> np.uint64(12)).astype(np.float64) * 2.0**-52
