"""Copies of arrays from the host to the device and back, while the device computes."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ToHost = Callable[[Tensor], Tensor]
"""Returns the copy of a tensor on the host, which the device may still be writing."""
_ALIGNMENT = 16
"""Bytes. Triton compiles other code for tensors that begin elsewhere."""


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return `array` on `device`, without waiting for earlier work of the device."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def all_to_device(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Return `arrays` on `device` by a single copy, without waiting for earlier work of the device.

    The tensors share their memory on the device. On the host they are packed into memory that torch gives to a later
    call only after the copy is done.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return unpack(pack(arrays, pinned=True).to(device, non_blocking=True), arrays)


def pack(arrays: Sequence[npt.NDArray[Any]], *, pinned: bool = False) -> Tensor:
    """Return the bytes of `arrays` one after another, uint8 [n] on the host, for `unpack`."""
    sizes = _sizes(arrays)
    packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
    to, at = packed.numpy(), 0
    for array, size in zip(arrays, sizes, strict=True):
        np.copyto(to[at : at + array.nbytes].view(array.dtype).reshape(array.shape), array)
        at += size
    return packed


def unpack(packed: Tensor, arrays: Sequence[npt.NDArray[Any]]) -> list[Tensor]:
    """Return the parts of `packed` as tensors of the shapes and dtypes of `arrays`, which `pack` has packed."""
    tensors, at = [], 0
    for array, size in zip(arrays, _sizes(arrays), strict=True):
        tensor = packed[at : at + array.nbytes].view(_dtype_of(array.dtype.str))
        tensors.append(tensor if array.ndim == 1 else tensor.view(array.shape))
        at += size
    return tensors


def _sizes(arrays: Sequence[npt.NDArray[Any]]) -> list[int]:
    return [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]


@functools.cache
def _dtype_of(name: str) -> torch.dtype:
    return torch.from_numpy(np.zeros(0, name)).dtype


def on_host(tensor: Tensor) -> Tensor:
    """Return `tensor` itself: the `ToHost` of tensors that are on the host already."""
    return tensor


class HostCopies:
    """Copies of tensors to the host, with one wait for all of them; no copies are made if the device is the host.

    The copies run in a stream of their own, beside the next step, which must not overwrite what they copy.
    """

    def __init__(self, stream: Any) -> None:
        """`stream` is a CUDA stream for the copies; None if the device is the host."""
        self._stream = stream
        self._copied: Any = None
        """The event after the copies; None before `end`."""
        self._taken: list[tuple[Tensor, Tensor]] = []
        """(on the host, on the device), which keeps the device's memory until its copy is complete."""

    def take(self, tensor: Tensor) -> Tensor:
        """Return `tensor` on the host, in pinned memory. It must not be read before `wait`."""
        if self._stream is None:
            return tensor
        on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._taken.append((on_host, tensor))
        return on_host

    def end(self) -> None:
        """Begin the copies, once the device has done all that it was given so far."""
        if self._stream is None:
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for on_host, tensor in self._taken:
                on_host.copy_(tensor, non_blocking=True)
        self._copied = self._stream.record_event()

    def wait(self) -> None:
        """Wait until the copies are complete, not for later work of the device."""
        if self._copied is not None:
            self._copied.synchronize()
            self._taken.clear()
