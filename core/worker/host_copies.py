"""Arrays on their way from the host to the device and back, while the device computes."""

from collections.abc import Callable
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

ToHost = Callable[[Tensor], Tensor]
"""Gives a tensor on the host, whose content may be on its way."""


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """`array` on `device`; the host does not wait for what the device has to do before."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def on_host(tensor: Tensor) -> Tensor:
    """A `ToHost` for tensors that are on the host already."""
    return tensor


class HostCopies:
    """Copies of tensors to the host that are under way together; where the device is the host, there are none."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def take(self, tensor: Tensor) -> Tensor:
        """`tensor` on the host, in pinned memory, to be read after `wait`."""
        if self._event is None:
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

    def end(self) -> None:
        """Note that all has been taken that `wait` is to wait for."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Return when all that was taken is there, whatever the device has been given to do since."""
        if self._event is not None:
            self._event.synchronize()
