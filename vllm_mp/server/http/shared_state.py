"""What the front processes of one server share."""

import mmap
import os

from vllm_mp.server.http.tenants import SECRET_BYTES

_NUMBER_BYTES = 8


def make_shared_memory(count: int, num_tenants: int, secret: bytes) -> int:
    """Return the descriptor of new memory for the `SharedState` of `count` front processes.

    `secret` is that of the server's tenants, of `SECRET_BYTES`.
    """
    descriptor = os.memfd_create("vllm_mp-fronts")
    os.ftruncate(descriptor, _num_bytes(count, num_tenants))
    os.pwrite(descriptor, secret, 0)
    return descriptor


class SharedState:
    """What the front processes of one server share, in memory and in a folder."""

    def __init__(self, descriptor: int, count: int, index: int, metrics_folder: str, num_tenants: int) -> None:
        """`descriptor` is that of memory which `make_shared_memory` has made for `count` processes.

        `index` is the number of this process among them, from 0.
        """
        memory = memoryview(mmap.mmap(descriptor, _num_bytes(count, num_tenants)))
        self.secret = bytes(memory[:SECRET_BYTES])
        """The secret of the server's tenants."""
        numbers = memory[SECRET_BYTES:].cast("q")
        self.has_loaded = numbers[:count]
        """1 for each process that serves or has served."""
        self.live_counts = numbers[count:]
        """The number of live requests of each tenant in the first process, then in the second, and so on."""
        self.index = index
        self.metrics_folder = metrics_folder
        self._num_tenants = num_tenants

    @property
    def num_loading(self) -> int:
        """Number of processes that have never served."""
        return len(self.has_loaded) - sum(self.has_loaded)

    def forget_live(self, index: int) -> None:
        """Count no live request of a process that has ended."""
        for tenant_index in range(index * self._num_tenants, (index + 1) * self._num_tenants):
            self.live_counts[tenant_index] = 0


def _num_bytes(count: int, num_tenants: int) -> int:
    return SECRET_BYTES + _NUMBER_BYTES * count * (1 + num_tenants)
