"""What the front processes of one server share."""

import mmap
import os

_BYTES = 16
"""Bytes for each process."""


def make_shared_memory(count: int) -> int:
    """Return the descriptor of new memory for the `SharedState` of `count` front processes."""
    descriptor = os.memfd_create("vllm_mp-fronts")
    os.ftruncate(descriptor, _BYTES * count)
    return descriptor


class SharedState:
    """What the front processes of one server share, in memory and in a folder."""

    def __init__(self, descriptor: int, count: int, index: int, metrics_folder: str) -> None:
        """`descriptor` is that of memory with two 64-bit integers for each of `count` processes.

        `index` is the number of this process among them, from 0.
        """
        memory = memoryview(mmap.mmap(descriptor, _BYTES * count)).cast("q")
        self.live_counts = memory[:count]
        """The number of live requests of each process."""
        self.has_loaded = memory[count:]
        """1 for each process that serves or has served."""
        self.index = index
        self.metrics_folder = metrics_folder

    @property
    def num_loading(self) -> int:
        """Number of processes that have never served."""
        return len(self.has_loaded) - sum(self.has_loaded)
