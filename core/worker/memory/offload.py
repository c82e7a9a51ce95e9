"""Releasing memory: weights move to host memory, and allocators return their unused memory."""

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

_BUFFER_BYTES = 2**28
"""Host memory is allocated in buffers of this size: torch rounds pinned memory up to a power of two, and pinning a
buffer takes less time than the interval of beats."""


class OffloadedWeights:
    """The weights of a model in host memory, pinned if the device is a GPU; they take no memory of the device.

    The model's tensors stay the same objects, with the same sizes and the same shared storages, but must not be read
    before `restore`.
    """

    def __init__(self, model: nn.Module, beat: Callable[[], None]) -> None:
        """Copy the weights to the host and free them on the device.

        `beat` is called often, here and in `restore`. Raises RuntimeError, and changes nothing, if they do not fit.
        """
        self._storages = [(storage, storage.nbytes()) for storage in _storages(model)]
        self._beat = beat
        self._buffers: list[Tensor] = []
        try:
            self._copy()
        except RuntimeError:
            self._buffers.clear()  # now, because the error's frames keep this object alive
            raise
        self._free()

    def restore(self) -> None:
        """Move the weights back to the device; raise RuntimeError, and take no memory, if they do not fit."""
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
            size = min(left, _BUFFER_BYTES)
            self._buffers.append(torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned))
            left -= size
        for device, host in self._pieces():
            self._beat()
            host.copy_(device, non_blocking=True)
        self._wait()

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (piece of a storage, piece of a buffer), uint8 [n] each, cut where either ends."""
        buffers = iter(self._buffers)
        room = torch.empty(0, dtype=torch.uint8)
        for storage, size in self._storages:
            data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            at = 0
            while at < size:
                if not len(room):
                    room = next(buffers)
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
    """Free unreferenced memory of host and device for other processes; raise RuntimeError if the device has failed."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        # Each stream with a matrix product has a workspace, also the streams on which graphs were captured.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()
    with contextlib.suppress(OSError, AttributeError):  # only GNU's C library has it
        ctypes.CDLL(None).malloc_trim(0)


def _storages(model: nn.Module) -> list[torch.UntypedStorage]:
    """Return the storages of the parameters, buffers and other tensors of the modules, without repetition."""
    found: dict[int, torch.UntypedStorage] = {}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes():
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = storage
    return [storage for storage in found.values() if storage.resizable()]
