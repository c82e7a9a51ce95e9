"""Combinations of parameters for tests whose full product of parameters would take too long.

A dimension is a list of values. A value that is a tuple stands for several parameters.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def by_turns(*dimensions: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return as many combinations as the longest dimension has values, as parameters of a test.

    Every value of all dimensions occurs: the shorter dimensions take their values by turns.
    """
    return [_parameters(dimensions, places) for places in _turns([len(dimension) for dimension in dimensions])]


def extended(*values: Any) -> list[Any]:
    """Return `values` as parameters of a test, marked `extended`."""
    return [pytest.param(*_flat([value]), marks=pytest.mark.extended) for value in values]


def covering(*dimensions: Sequence[Any], rest_is_extended: bool = False) -> list[Any]:
    """Return combinations in which each pair of values of any two dimensions occurs, as parameters of a test.

    The first combinations are those of `by_turns`; `rest_is_extended` marks the others, which are chosen greedily: each
    begins with the first pair that is missing, and the other dimensions take the values that add the most missing
    pairs. Two dimensions give their product.
    """
    sizes = [len(dimension) for dimension in dimensions]
    missing = {
        frozenset(((first, i), (second, j))): None
        for first, second in itertools.combinations(range(len(sizes)), 2)
        for i, j in itertools.product(range(sizes[first]), range(sizes[second]))
    }
    chosen = _turns(sizes)
    num_by_turns = len(chosen)
    for places in chosen:
        _remove_pairs(missing, places)
    while missing:
        places = _with_most_pairs(dict(next(iter(missing))), sizes, missing, len(chosen))
        _remove_pairs(missing, places)
        chosen.append(places)
    return [
        pytest.param(
            *_parameters(dimensions, places),
            marks=[pytest.mark.extended] if rest_is_extended and n >= num_by_turns else [],
        )
        for n, places in enumerate(chosen)
    ]


_Pairs = dict[frozenset[tuple[int, int]], None]
"""Pairs of (dimension, place of the value in it), in order."""


def _turns(sizes: Sequence[int]) -> list[list[int]]:
    return [[n % size for size in sizes] for n in range(max(sizes))]


def _with_most_pairs(begun: dict[int, int], sizes: Sequence[int], missing: _Pairs, turn: int) -> list[int]:
    """Return the places of a combination that has those in `begun`, by dimension.

    Of values that add as many pairs, the next one from `turn` on is taken, so that all occur about equally often.
    """
    for dimension, size in enumerate(sizes):
        if dimension not in begun:
            num_added = {
                place % size: sum(frozenset(((dimension, place % size), other)) in missing for other in begun.items())
                for place in range(turn, turn + size)
            }
            begun[dimension] = max(num_added, key=num_added.__getitem__)
    return [begun[dimension] for dimension in range(len(sizes))]


def _remove_pairs(missing: _Pairs, places: Sequence[int]) -> None:
    for pair in itertools.combinations(enumerate(places), 2):
        missing.pop(frozenset(pair), None)


def _parameters(dimensions: Sequence[Sequence[Any]], places: Sequence[int]) -> tuple[Any, ...]:
    return _flat([dimension[place] for dimension, place in zip(dimensions, places, strict=True)])


def _flat(values: Sequence[Any]) -> tuple[Any, ...]:
    """Return `values` with the elements of tuples in their place."""
    return tuple(itertools.chain.from_iterable(value if isinstance(value, tuple) else (value,) for value in values))
