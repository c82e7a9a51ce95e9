"""A selection of tests for checks that take too long with all of them."""

import pytest


def sample(items: list[pytest.Function]) -> list[pytest.Function]:
    """Return the first test of each function and one of eleven of the others, in their order.

    Eleven shares no factor with the numbers of values of parameters, so each value occurs.
    """
    first = {item.function: item for item in reversed(items)}
    return [item for i, item in enumerate(items) if i % 11 == 0 or first[item.function] is item]
