"""Copies of arrays from the host to the device and back, while the device computes."""

from collections.abc import Callable
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

ToHost = Callable[[Tensor], Tensor]
"""Returns the copy of a tensor on the host, which the device may still be writing."""


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return `array` on `device`, without waiting for earlier work of the device."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def on_host(tensor: Tensor) -> Tensor:
    """Return `tensor` itself: the `ToHost` of tensors that are on the host already."""
    return tensor


class HostCopies:
    """Copies of tensors to the host, with one wait for all of them; no copies are made if the device is the host."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        """None if the device is the host."""
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def take(self, tensor: Tensor) -> Tensor:
        """Return `tensor` on the host, in pinned memory. It must not be read before `wait`."""
        if self._event is None:
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

    def end(self) -> None:
        """Mark the point in the device's work that `wait` waits for."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Wait until all copies before `end` are complete, not for later work of the device."""
        if self._event is not None:
            self._event.synchronize()
