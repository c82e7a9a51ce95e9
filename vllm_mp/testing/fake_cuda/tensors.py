"""Operations on tensors of the fake device: torch computes their shapes, dtypes and strides, and nothing else."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm_mp.testing.fake_cuda.journal import FakeDevice

_aten: Any = torch.ops.aten
_WeakReference: Any = StorageWeakRef
_CPU = torch.device("cpu")
_UNSEEN = {torch.float32: float("nan"), torch.float64: float("nan"), torch.int64: -(2**62), torch.int32: -(2**30)}
"""What the host reads of a copy for which it has not waited."""


@contextlib.contextmanager
def fake_tensors(device: FakeDevice) -> Iterator[None]:
    """Make tensors on CUDA fake in the block; those on the CPU stay real."""
    with (
        patch.object(FakeTensor, "data_ptr", _address),
        patch.object(torch.UntypedStorage, "data_ptr", _storage_address),
        patch.object(torch.UntypedStorage, "device", property(_storage_device)),
        FakeTensorMode(allow_non_fake_inputs=True),
        _Operations(device),
    ):
        yield


_of_storage = torch.UntypedStorage.data_ptr
_device_of_storage: Any = torch.UntypedStorage.device


def _storage_address(storage: torch.UntypedStorage) -> int:
    """Return an address that no other storage has, aligned as those of torch's allocator for CUDA are."""
    return storage._cdata << 9 if _storage_device(storage).type == "cuda" else _of_storage(storage)


def _storage_device(storage: torch.UntypedStorage) -> torch.device:
    found: torch.device = _device_of_storage.__get__(storage)
    return torch.device("cuda", 0) if found.type == "meta" else found


def _address(tensor: Tensor) -> int:
    return int(_storage_address(tensor.untyped_storage()) + tensor.storage_offset() * tensor.element_size())


def is_on_device(value: object) -> bool:
    """Tell whether `value` is a tensor of the fake device."""
    return isinstance(value, FakeTensor) and value.fake_device.type == "cuda"


@torch.inference_mode()
def _fill(on_host: Tensor, value: float) -> None:
    with unset_fake_temporarily():
        on_host.fill_(value)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Divides operations among the CPU, which computes, and the fake device; copies between them are noted."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._pinned: dict[int, Any] = {}
        self._special: dict[Any, Callable[..., Any]] = {
            _aten._to_copy.default: self._to_copy,
            _aten.copy_.default: self._copy,
            _aten._local_scalar_dense.default: self._item,
            _aten.nonzero.default: self._nonzero,
            _aten.masked_select.default: self._masked_select,
            _aten.index.Tensor: self._index,
        }

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which saves the import of the compiler

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        wanted = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), _CPU)
        if wanted.type == "cpu" and not any(map(is_on_device, tensors)):
            return self._on_host(func, args, kwargs)
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if func._can_decompose():
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        for tensor in tensors:
            if is_on_device(tensor):
                self._device.used(tensor)
            elif tensor.dim() and func not in (_aten._to_copy.default, _aten.copy_.default):
                self._device.wait(f"{func.overloadpacket.__name__} of a tensor on the host")
        if not (func.is_view or func in self._special or "empty" in func.overloadpacket.__name__):
            self._device.work.append(func.overloadpacket.__name__)
        result = self._special.get(func, func)(*args, **kwargs)
        for made in tree_leaves(result):
            if is_on_device(made):
                self._device.made(made)
        return result

    def _on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        pins = kwargs.get("pin_memory")
        if pins:
            kwargs["pin_memory"] = False
        with unset_fake_temporarily():
            if func in (_aten.pin_memory.default, _aten._pin_memory.default):
                return self._pin(args[0].clone())
            if func is _aten.is_pinned.default:
                return self._is_pinned(args[0])
            result = func(*args, **kwargs)
            return self._pin(result) if pins else result

    def _pin(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = _WeakReference(storage)
        return tensor

    def _is_pinned(self, tensor: Tensor) -> bool:
        found = self._pinned.get(tensor.untyped_storage()._cdata)
        return found is not None and not bool(found.expired())

    def _to_copy(self, source: Tensor, **options: Any) -> Tensor:
        wanted = options.get("device")
        if is_on_device(source):
            if wanted is None or wanted.type == "cuda":
                self._device.work.append("copy")
                copied: Tensor = _aten._to_copy.default(source, **options)
                return copied
            self._device.wait("a copy to the host")
            with unset_fake_temporarily():
                return torch.zeros(source.shape, dtype=options.get("dtype") or source.dtype)
        self._to_device(source, non_blocking=options.get("non_blocking", False))
        dtype = options.get("dtype") or source.dtype
        return torch.empty(source.shape, dtype=dtype, device=wanted)

    def _copy(self, destination: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if is_on_device(destination):
            if is_on_device(source):
                self._device.work.append("copy")
                _aten.copy_.default(destination, source, non_blocking)
            else:
                self._to_device(source, non_blocking)
                _aten.expand.default(source, destination.shape)  # raises if the shapes do not fit
            return destination
        if non_blocking and self._is_pinned(destination):
            _fill(destination, _UNSEEN.get(destination.dtype, 1))
            self._device.copy_to_host(functools.partial(_fill, destination, 0))
        else:
            self._device.wait("a copy to the host")
            _fill(destination, 0)
        return destination

    def _to_device(self, source: Tensor, non_blocking: bool) -> None:
        self._device.work.append("copy to the device")
        if self._device.is_capturing:
            self._device.fault("a copy from the host is captured, which repeats the same values")
        if not (non_blocking and self._is_pinned(source)):
            self._device.wait("a copy from memory that is not pinned" if non_blocking else "a copy from the host")

    def _item(self, tensor: Tensor) -> Any:
        self._device.wait("item")
        return False if tensor.dtype == torch.bool else 0.0 if tensor.is_floating_point() else 0

    def _nonzero(self, tensor: Tensor) -> Tensor:
        self._device.wait("nonzero")
        return torch.empty((0, tensor.dim()), dtype=torch.int64, device=tensor.device)

    def _masked_select(self, tensor: Tensor, mask: Tensor) -> Tensor:
        self._device.wait("masked_select")
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def _index(self, tensor: Tensor, indices: list[Tensor | None]) -> Tensor:
        """Index by numbers; a mask becomes the indices of its true elements, for which the host waits."""
        self._device.work.append("index")
        found: list[Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                found.extend(self._nonzero(index).unbind(1))
            else:
                found.append(index)
        result: Tensor = _aten.index.Tensor(tensor, found)
        return result
