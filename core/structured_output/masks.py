"""The masks of several rows, filled in parallel where that is faster."""

import os
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vllm_mp.core.structured_output.grammar import GrammarError, Matcher

if TYPE_CHECKING:
    from llguidance import LLExecutor

_MIN_PARALLEL = 16
"""Number of masks from which on threads are faster than a loop."""
_MAX_THREADS = 8


def fill_masks(
    matchers: Mapping[int, Matcher], masks: npt.NDArray[np.int32], may_use_threads: bool = True
) -> dict[int, GrammarError]:
    """Write the tokens that each matcher allows into the row of `masks` [n, num_words] that is its key.

    `may_use_threads` must be False where threads compute the model on the same processors: these wait actively for the
    next step, so that other threads come late. A loop takes a fifth of a millisecond for 64 rows.

    Return the errors of the matchers that have reached a limit, by row; these rows have no meaning.
    """
    is_parallel = (
        may_use_threads
        and len(matchers) >= _MIN_PARALLEL
        and masks.flags.c_contiguous
        and all(matcher.num_words == masks.shape[1] for matcher in matchers.values())
    )
    if is_parallel:
        pairs = [(matcher.library_matcher, row) for row, matcher in matchers.items()]
        address = masks.__array_interface__["data"][0]
        _executor().unsafe_compute_mask_ptr(pairs, address, masks.strides[0], len(masks))
    errors = {}
    for row, matcher in matchers.items():
        try:
            if is_parallel:
                matcher.check()
            else:
                matcher.fill(masks[row])
        except GrammarError as error:
            errors[row] = error
    return errors


@cache
def _executor() -> "LLExecutor":
    from llguidance import LLExecutor

    return LLExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0))))
