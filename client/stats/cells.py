"""The numbers behind all counters of a process, in one array that several processes may see."""

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
"""[num_cells] a reading of all cells."""
_SUFFIX = ".cells"


class Cells:
    """An array of float64 counters, private at first; `share` moves it into a file in a folder.

    The processes of one server reserve the same cells in the same order, so that cell i means the same in each. The
    file of a process that has died still counts. A file belongs to one process at a time, its only writer.
    """

    def __init__(self, settle: Callable[[], None] = lambda: None) -> None:
        """`settle` is called before the numbers are read, to count what waits to be counted."""
        self.settle = settle
        self.values: Values = np.zeros(0)
        """[num_cells]; replaced by `reserve` and `share`, so read the attribute each time."""
        self.view = _view(self.values)
        """The same numbers, with faster access to single cells."""
        self._takes_maximum: list[bool] = []
        """Whether the sum over processes of each cell is the maximum, because all of them count the same events."""
        self._file: Path | None = None

    def reserve(self, count: int, takes_maximum: bool = False) -> int:
        """Return the index of the first of `count` new cells, which are 0. Raises RuntimeError after `share`.

        `takes_maximum`: every process counts the same events, so `total` is the maximum over processes, not the sum.
        """
        if self._file is not None:
            raise RuntimeError("cells cannot be reserved after `share`: other processes have the layout of before")
        start = len(self.values)
        self._use(np.concatenate([self.values, np.zeros(count)]))
        self._takes_maximum += [takes_maximum] * count
        return start

    def share(self, folder: Path, name: str) -> None:
        """Keep the cells in the file `name` of `folder` from now on, adding them to the numbers in an existing file.

        `folder` must be private to one server. Raises OSError if the file cannot be made.
        """
        file = folder / f"{name}{_SUFFIX}"
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            size = self.values.nbytes
            if os.fstat(descriptor).st_size != size:
                os.ftruncate(descriptor, 0)
                os.ftruncate(descriptor, size)
            # The space is allocated now: on a full disk the first write to the memory would end this process.
            os.posix_fallocate(descriptor, 0, size)
            mapped: Values = np.frombuffer(mmap.mmap(descriptor, size), np.float64)
        finally:
            os.close(descriptor)
        mapped += self.values
        self._file = file
        self._use(mapped)

    def total(self) -> Values:
        """Return the numbers of all processes that share the folder: a copy, [num_cells]."""
        self.settle()
        if self._file is None:
            return self.values.copy()
        others = [np.fromfile(file) for file in self._file.parent.glob(f"*{_SUFFIX}") if file != self._file]
        # A file of another length is one that its process is just making.
        stacked = np.stack([self.values, *(array for array in others if len(array) == len(self.values))])
        total: Values = np.where(np.array(self._takes_maximum), stacked.max(0), stacked.sum(0))
        return total

    def _use(self, values: Values) -> None:
        self.values, self.view = values, _view(values)


def _view(values: Values) -> "memoryview[float]":
    return values.data.cast("B").cast("d") if len(values) else memoryview(b"").cast("d")
