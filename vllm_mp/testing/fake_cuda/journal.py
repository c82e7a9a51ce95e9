"""What happens on the fake device, and what of it is wrong."""

import contextlib
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_WeakReference: Any = StorageWeakRef
_HERE = str(Path(__file__).parent)
_PRODUCT = str(Path(__file__).parents[2])
_LIBRARIES = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")


class FakeDevice:
    """Counts launches, compilations, waits and replays, and collects faults, each with the line that caused it."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.capability = capability
        self.faults: list[str] = []
        self.kernels: dict[str, int] = {}
        """The number of launches by the name of the kernel; a replay launches none."""
        self.work: list[str] = []
        """What the host gave the device to do, in order: kernels, torch's operations, copies, replays."""
        self.compilations: list[str] = []
        """"kernel at file:line" of each specialization that was compiled."""
        self.waits: list[str] = []
        """"reason at file:line" of each wait of the host for the device."""
        self.num_replays = 0
        self.num_captures = 0
        self.waits_raise = False
        """Whether a wait raises, as `torch.cuda.set_sync_debug_mode("error")` asks for."""
        self.is_capturing = False
        self._promptly: str | None = None
        """What runs now and must not wait; None if waits are allowed."""
        self._of_graph: set[int] = set()
        """The storages that were made in the capture that runs."""
        self._read: dict[int, Any] = {}
        """The other storages that it uses."""
        self.num_copies = 0
        """The number of copies to the host that have begun without a wait."""
        self._unfinished: list[Callable[[], None]] = []
        """The last of them, which nothing has waited for yet."""

    def fault(self, what: str) -> None:
        self.faults.append(f"{what} at {_line()}")

    def wait(self, why: str, until: int | None = None) -> None:
        """Note that the host waits for the device's work, or for the first `until` copies; `why` names the operation.

        Raises RuntimeError where CUDA would: during a capture, and if `waits_raise`.
        """
        if self.is_capturing:
            self.fault(f"{why} waits for the device during a capture")
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        if self.waits_raise:
            raise RuntimeError("called a synchronizing CUDA operation")
        self.waits.append(f"{why} at {_line()}")
        if self._promptly is not None:
            self.fault(f"{why} waits for the device in {self._promptly}")
        count = len(self._unfinished) - (0 if until is None else self.num_copies - until)
        finished, self._unfinished = self._unfinished[: max(0, count)], self._unfinished[max(0, count) :]
        for finish in finished:
            finish()

    @contextlib.contextmanager
    def without_waits(self, what: str) -> Iterator[None]:
        """Note a fault for each wait in the block, which computes `what`."""
        before, self._promptly = self._promptly, what
        try:
            yield
        finally:
            self._promptly = before

    def compiled(self, kernel: str) -> None:
        """Note that a specialization of `kernel` is compiled, which takes the host a second and may not be captured."""
        self.compilations.append(f"{kernel} at {_line()}")
        if self.is_capturing:
            self.fault(f"{kernel} is compiled during a capture")

    def copy_to_host(self, finish: Callable[[], None]) -> None:
        """Note a copy that `finish` makes visible to the host once something waits for it."""
        self.work.append("copy to the host")
        if self.is_capturing:
            self.fault("a copy to the host is captured")
        self.num_copies += 1
        self._unfinished.append(finish)

    def begin_capture(self) -> None:
        self.wait("the begin of a capture")
        self.is_capturing, self._of_graph, self._read = True, set(), {}

    def end_capture(self) -> Callable[[], None]:
        """End the capture; return the replay of what it has recorded."""
        self.is_capturing, read = False, list(self._read.values())
        self.num_captures += 1

        def replay() -> None:
            self.num_replays += 1
            self.work.append("replay")
            if gone := sum(storage.expired() for storage in read):
                self.fault(f"a replay uses {gone} tensors whose memory was released after the capture")

        return replay

    def used(self, tensor: Tensor) -> None:
        """Note that the device reads or writes `tensor`."""
        if self.is_capturing:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._of_graph:
                self._read.setdefault(storage._cdata, _WeakReference(storage))

    def made(self, tensor: Tensor) -> None:
        """Note that an operation has returned `tensor`."""
        if self.is_capturing and (key := tensor.untyped_storage()._cdata) not in self._read:
            self._of_graph.add(key)


def _line() -> str:
    """Return "file:line" of the innermost frame of the product, or else of a test."""
    other = ""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PRODUCT) and not file.startswith(_HERE):
            return f"{os.path.basename(file)}:{frame.f_lineno}"
        if not other and not file.startswith((_HERE, *_LIBRARIES)):
            other = f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return other
