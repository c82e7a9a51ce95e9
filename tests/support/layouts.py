"""Numbers of ranks and stages that tests compare with one process."""

import functools
from typing import NamedTuple

import pytest

from support.answers import NEAR_TIE, answers, assert_near
from support.local_engine import LocalEngine


class Layout(NamedTuple):
    """How many ranks compute each layer, and how many stages share out the layers."""

    size: int = 1
    num_stages: int = 1


LAYOUTS = {
    "tensor-2": Layout(2),
    "tensor-4": Layout(4),
    "pipeline-2": Layout(1, 2),
    "pipeline-3": Layout(1, 3),
    "tensor-2-pipeline-2": Layout(2, 2),
}


def layouts(*names):
    """Return the mark that runs a test with the layouts called `names`."""
    return pytest.mark.parametrize("layout", [LAYOUTS[name] for name in names], ids=names)


largest_layouts = layouts("tensor-4", "pipeline-3", "tensor-2-pipeline-2")
"""The mark that runs a test with the layouts that do all that the others do."""


def with_layouts(names, *pairs, extended=()):
    """Return the mark that runs a test with pairs of a value of the parameters `names` and the name of a layout.

    A value is a string or a tuple of strings. The pairs `extended` are marked so.
    """
    return pytest.mark.parametrize(
        f"{names}, layout",
        [
            pytest.param(
                *([value] if isinstance(value, str) else value),
                LAYOUTS[name],
                id="-".join([value, name] if isinstance(value, str) else [*value, name]),
                marks=[pytest.mark.extended] if (value, name) in extended else [],
            )
            for value, name in (*pairs, *extended)
        ],
    )


def assert_like(layout, found, expected, near_tie=NEAR_TIE):
    """Raise AssertionError unless the answers are equal; up to near-ties where ranks round sums otherwise."""
    if layout.size == 1:
        assert found == expected
    else:
        assert_near(found, expected, near_tie)


@functools.cache
def answers_of_one_process(folder, **options):
    """Return the greedy answers of an engine with `options`."""
    return answers(LocalEngine(folder, **options))
