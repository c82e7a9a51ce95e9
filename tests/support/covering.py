"""Combinations of parameters for tests of kernels."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def covering(*dimensions: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return the product of the dimensions, one list of values for each combination, as parameters of a test.

    Of the combinations that have the same values in all but the last dimension, one is left for a run without slow
    tests. Such a run has each pair of values of the first two of three dimensions, and the values of the last by turns.
    """
    sizes = [range(len(dimension)) for dimension in dimensions]
    return [
        pytest.param(
            *itertools.chain.from_iterable(
                dimension[place] for dimension, place in zip(dimensions, places, strict=True)
            ),
            marks=[] if sum(places[:-1]) % len(dimensions[-1]) == places[-1] else [pytest.mark.slow],
        )
        for places in itertools.product(*sizes)
    ]
