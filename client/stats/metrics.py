"""Counters and histograms, whose numbers lie in `Cells`."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_mp.client.stats.cells import Cells, Values

_FEW = 12
"""Number of observations up to which counting them one by one is faster than with arrays."""


class Counter:
    """A number of events, by the value of a label if there is one."""

    def __init__(self, cells: Cells, label_values: Sequence[str] = ("",), takes_maximum: bool = False) -> None:
        """`takes_maximum` is as in `Cells.reserve`."""
        self.label_values = tuple(label_values)
        self._cells = cells
        self._start = cells.reserve(len(self.label_values), takes_maximum)
        self._index = {value: self._start + i for i, value in enumerate(self.label_values)}

    def add(self, count: float, label_value: str = "") -> None:
        """Count `count` more events. Raises KeyError for a label value that was not declared."""
        self._cells.view[self._index[label_value]] += count

    def read(self, values: Values) -> dict[str, float]:
        """Return the numbers in a reading of the cells, by label value."""
        return {value: float(values[cell]) for value, cell in self._index.items()}

    @property
    def value(self) -> float:
        """The number of events of this process, over all label values."""
        self._cells.settle()
        return float(self._cells.values[self._start : self._start + len(self.label_values)].sum())


@dataclass(frozen=True, slots=True)
class HistogramReading:
    """The numbers of a histogram."""

    bounds: tuple[float, ...]
    """Upper bounds of all buckets but the last, which has none."""
    counts: list[float]
    """Number of observations in each bucket: above the bound before, up to and including its own."""
    sum: float
    """Sum of all observations."""

    @property
    def count(self) -> float:
        """Number of observations."""
        return sum(self.counts)

    def quantile(self, share: float) -> float | None:
        """Return an estimate of the value that `share` of the observations do not exceed; None without observations.

        Observations count as spread evenly over their bucket; observations in the last bucket count as its lower bound.
        """
        rank = share * self.count
        lower = 0.0
        if rank <= 0:
            return None
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if count >= rank:
                return lower + (bound - lower) * rank / count
            rank -= count
            lower = bound
        return lower


class Histogram:
    """Observations, counted by bucket."""

    def __init__(self, cells: Cells, bounds: Sequence[float]) -> None:
        """`bounds` are the upper bounds of the buckets, in rising order; one more bucket takes what is above."""
        self.bounds = tuple(map(float, bounds))
        self._array = np.array(self.bounds)
        self._cells = cells
        self._start = cells.reserve(len(self.bounds) + 2)
        self._sum = self._start + len(self.bounds) + 1

    def observe(self, value: float, count: int = 1) -> None:
        """Count `count` observations of `value`."""
        view = self._cells.view
        view[self._start + bisect_left(self.bounds, value)] += count
        view[self._sum] += value * count

    def observe_all(self, observations: Sequence[float]) -> None:
        """Count each of `observations`."""
        if len(observations) <= _FEW:
            for observation in observations:
                self.observe(observation)
            return
        buckets = np.bincount(np.searchsorted(self._array, observations), minlength=len(self.bounds) + 1)
        values = self._cells.values
        values[self._start : self._sum] += buckets
        values[self._sum] += sum(observations)

    def read(self, values: Values) -> HistogramReading:
        """Return the numbers in a reading of the cells."""
        return HistogramReading(self.bounds, values[self._start : self._sum].tolist(), float(values[self._sum]))
