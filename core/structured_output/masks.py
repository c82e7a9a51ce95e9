"""The masks of several rows, filled in parallel where the library can."""

import os
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vllm_mp.core.structured_output.grammar import GrammarError, Matcher
from vllm_mp.core.structured_output.llguidance_backend import LLGuidanceMatcher

if TYPE_CHECKING:
    from llguidance import LLExecutor

_MIN_PARALLEL = 16
"""Number of masks from which on threads are faster than a loop."""
_MAX_THREADS = 8


def fill_masks(matchers: Sequence[Matcher], masks: npt.NDArray[np.int32]) -> dict[int, GrammarError]:
    """Write the tokens that each matcher allows into the row of `masks` [num_matchers, num_words] with its index.

    Return the errors of the matchers that have reached a limit, by their index; their rows have no meaning.
    """
    errors = {}
    parallel = []
    if len(matchers) >= _MIN_PARALLEL and masks.flags.c_contiguous:
        parallel = [row for row, matcher in enumerate(matchers) if _fits(matcher, masks.shape[1])]
    if len(parallel) > 1:
        pairs = [(matchers[row].library_matcher, row) for row in parallel]  # type: ignore[attr-defined]
        address = masks.__array_interface__["data"][0]
        _executor().unsafe_compute_mask_ptr(pairs, address, masks.strides[0], len(masks))
    else:
        parallel = []
    filled = frozenset(parallel)
    for row, matcher in enumerate(matchers):
        try:
            if row in filled:
                matcher.check()  # type: ignore[attr-defined]
            else:
                matcher.fill(masks[row])
        except GrammarError as error:
            errors[row] = error
    return errors


def _fits(matcher: Matcher, num_words: int) -> bool:
    return isinstance(matcher, LLGuidanceMatcher) and matcher.num_words == num_words


@cache
def _executor() -> "LLExecutor":
    from llguidance import LLExecutor

    return LLExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0))))
