"""Giving memory back: weights that wait in host memory, and allocators that keep nothing for later."""

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

_STRETCH_BYTES = 2**28
"""Of host memory: torch rounds what is pinned up to a power of two, and that much is pinned without a long silence."""


class OffloadedWeights:
    """The weights of a model in host memory, pinned where the device is not the host, while the device has none.

    The model's tensors stay the same objects, of the same sizes and sharing the same storages, but nothing may read
    them before `restore`.
    """

    def __init__(self, model: nn.Module, beat: Callable[[], None]) -> None:
        """Copy the weights to the host and free the device's.

        `beat` is called again and again. Raises RuntimeError when the host has no memory for them, and has changed
        nothing then.
        """
        self._storages = [(storage, storage.nbytes()) for storage in _storages(model)]
        self._beat = beat
        self._stretches: list[Tensor] = []
        try:
            self._copy()
        except RuntimeError:
            self._stretches.clear()  # now, not when whoever is told of the error has let go of it
            raise
        self._free()

    def restore(self) -> None:
        """Bring the weights back; raises RuntimeError when the device has no memory for them, and takes none then."""
        try:
            for storage, size in self._storages:
                storage.resize_(size)
            for device, host in self._pieces():
                self._beat()
                device.copy_(host, non_blocking=True)
            self._wait()
        except RuntimeError:
            self._free()
            raise

    def _copy(self) -> None:
        is_pinned = any(storage.device.type == "cuda" for storage, _ in self._storages)
        left = sum(size for _, size in self._storages)
        while left:
            self._beat()
            size = min(left, _STRETCH_BYTES)
            self._stretches.append(torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned))
            left -= size
        for device, host in self._pieces():
            self._beat()
            host.copy_(device, non_blocking=True)
        self._wait()

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The storages and the stretches side by side, uint8 [n] each, cut where either ends."""
        stretches = iter(self._stretches)
        room = torch.empty(0, dtype=torch.uint8)
        for storage, size in self._storages:
            data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            at = 0
            while at < size:
                if not len(room):
                    room = next(stretches)
                count = min(size - at, len(room))
                yield data[at : at + count], room[:count]
                room = room[count:]
                at += count

    def _wait(self) -> None:
        if any(storage.device.type == "cuda" for storage, _ in self._storages):
            torch.cuda.synchronize()

    def _free(self) -> None:
        for storage, _ in self._storages:
            storage.resize_(0)


def release_memory(device: torch.device) -> None:
    """Give the system and other processes what nothing refers to any more.

    Raises RuntimeError when the device has failed.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        # Each stream that matrices were multiplied on has a workspace, those that graphs were captured on too.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()
    with contextlib.suppress(OSError, AttributeError):  # other C libraries than GNU's have none
        ctypes.CDLL(None).malloc_trim(0)


def _storages(model: nn.Module) -> list[torch.UntypedStorage]:
    """What the parameters, buffers and other tensors of the modules lie in, each once."""
    found: dict[int, torch.UntypedStorage] = {}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes():
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = storage
    return [storage for storage in found.values() if storage.resizable()]
