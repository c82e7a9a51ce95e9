"""Combinations of parameters: each value by turns, and each pair of values."""

import itertools

import pytest
from support.covering import by_turns, covering, extended


@pytest.mark.parametrize(
    "sizes", [(5, 5, 3, 2, 2), (7, 3, 3), (2, 2, 4, 4), (6, 6, 6), (2, 2, 2, 2, 2), (4, 3), (1, 1)]
)
def test_each_pair_of_values_of_two_dimensions_occurs_in_few_combinations(sizes):
    dimensions = [[(number, value) for value in range(size)] for number, size in enumerate(sizes)]
    found = [parameter.values for parameter in covering(*[[(value,) for value in each] for each in dimensions])]
    for (i, first), (j, second) in itertools.combinations(enumerate(dimensions), 2):
        assert {(values[i], values[j]) for values in found} == set(itertools.product(first, second))
    largest, second_largest, *_ = sorted(sizes, reverse=True)
    assert len(found) <= 1.5 * largest * second_largest + 2
    assert len(set(found)) == len(found)


def test_combinations_by_turns_have_every_value_and_are_the_first_of_those_with_every_pair():
    dimensions = ["a", "b"], [(1, "one"), (2, "two"), (3, "three")]
    turns = [("a", 1, "one"), ("b", 2, "two"), ("a", 3, "three")]
    assert by_turns(*dimensions) == turns
    found = covering(*dimensions, rest_is_extended=True)
    assert [parameter.values for parameter in found[:3]] == turns
    assert [bool(parameter.marks) for parameter in found] == [False] * 3 + [True] * 3
    assert not any(parameter.marks for parameter in covering(*dimensions))


def test_extended_values_are_marked():
    assert [(p.values, [mark.name for mark in p.marks]) for p in extended(1, (2, "x"))] == [
        ((1,), ["extended"]),
        ((2, "x"), ["extended"]),
    ]
