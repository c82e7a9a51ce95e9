"""Launches of Triton kernels, which Triton binds and specializes, and which are checked in place of being run."""

import functools
import importlib
import os
import re
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from vllm_mp.testing.fake_cuda.journal import FakeDevice
from vllm_mp.testing.fake_cuda.tensors import is_on_device

_KERNELS: Final = "vllm_mp.kernels.triton"
_MAX_GRID: Final = (2**31 - 1, 65_535, 65_535)
"""The most programs along each axis of a grid, from the CUDA programming guide."""
_DECLARED = re.compile(r"^    (\w+),?  # (.*)$", re.MULTILINE)
"""A parameter of a kernel and the comment beside it."""
_DTYPES: Final = {
    "float32": torch.float32,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
}
_CONDITION = re.compile(r" (if|unless) ([A-Z_]+)\b")


class FakeDriver:
    """What `JITFunction.run` asks Triton's driver."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


class Launches:
    """Stands in for the compiler: gives `JITFunction.run` kernels that check how they are launched."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        compiled_operations()
        for module in _copies.values():
            for value in vars(module).values():
                # What an earlier device has left.
                if isinstance(value, JITFunction):
                    value.device_caches.clear()
                elif hasattr(value, "cache_clear"):
                    value.cache_clear()

    def in_place_of_compiler(self) -> Callable[..., Any]:
        """Return what stands in for `JITFunction._do_compile`, which Triton calls for a key that it has not cached."""

        def compile_kernel(
            kernel: Any, key: str, signature: Any, device: int, constants: Any, options: Any, *_: Any, **__: Any
        ) -> Any:
            return self._compile(kernel, key, options)

        return compile_kernel

    def _compile(self, kernel: Any, key: str, options: Any) -> Any:
        self._device.compiled(kernel.__name__)
        made = SimpleNamespace(
            launch_metadata=lambda *_: None,
            run=functools.partial(self._launch, kernel, options),
            function=None,
            packed_metadata=None,
        )
        kernel.device_caches[0][0][key] = made
        return made

    def _launch(self, kernel: Any, options: Any, x: int, y: int, z: int, *rest: Any) -> None:
        """Check a launch; `rest` are six values of Triton's and then all arguments in order."""
        values = dict(zip(kernel.arg_names, rest[6:], strict=True))
        name = kernel.__name__
        self._device.kernels[name] = self._device.kernels.get(name, 0) + 1
        self._device.work.append(name)
        for axis, size, most in zip("xyz", (x, y, z), _MAX_GRID, strict=True):
            if not 0 < size <= most:
                self._device.fault(f"{name} is launched with {size} programs along {axis}; there may be 1 to {most}")
        launch = copy_of("launch")
        shared, limit = _least_shared_bytes(name, values, options.num_stages), launch.shared_bytes("cuda", None)
        if shared > limit:
            self._device.fault(f"{name} takes {shared:,} bytes of shared memory or more; a program has {limit:,}")
        declared = _declared(kernel)
        numbers = {value for value in values.values() if isinstance(value, int)}
        for parameter, value in values.items():
            if isinstance(value, Tensor):
                self._check(f"{parameter} of {name}", value, numbers, declared.get(parameter, ""), values)

    def _check(self, what: str, tensor: Tensor, numbers: set[int], declared: str, values: dict[str, Any]) -> None:
        """Check a tensor of which a kernel gets the address, beside `numbers`."""
        if not is_on_device(tensor):
            self._device.fault(f"{what} is on the host")
            return
        self._device.used(tensor)
        inner = 1
        for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
            if size > 1 and stride != inner and stride not in numbers:
                self._device.fault(
                    f"{what} has strides {tensor.stride()} for {list(tensor.shape)}, of which the kernel is not told"
                )
                break
            inner = stride * size if size > 1 else inner * size
        dtypes = _dtypes(declared, values)
        if dtypes and tensor.dtype not in dtypes:
            self._device.fault(f"{what} is {tensor.dtype}, and declared as {declared!r}")


def _least_shared_bytes(name: str, values: dict[str, Any], num_stages: int) -> int:
    """Return what `launch.least_shared_bytes` says of a launch with these arguments."""
    entry = {key: value for key, value in values.items() if key.isupper() and isinstance(value, int)}
    if name == "_few_rows_kernel":
        kind = "linear/" + ("blocks" if values["GROUPED"] else str(8 * values["weight"].itemsize))
    elif name in ("_prefill_kernel", "_decode_kernel"):
        size = max(values["KEY_TILE"], values["VALUE_TILE"])
        kind = f"{name.split('_')[1]}/{8 * values['k_cache'].itemsize}/{size}"
    else:
        kind = {"_product_kernel": "fp8/", "_shrink_kernel": "lora_shrink/"}.get(name, "")
    found: int = copy_of("launch").least_shared_bytes(kind, entry | {"num_stages": num_stages})
    return found


@functools.cache
def _declared(kernel: Any) -> dict[str, str]:
    """Return the comments beside the parameters of `kernel`."""
    head = kernel.src.partition("):\n")[0]
    return dict(_DECLARED.findall(head))


def _dtypes(declared: str, values: dict[str, Any]) -> list[torch.dtype]:
    """Return the dtypes that a comment allows; [] if it names none, or none under the conditions of this launch."""
    for kind, constant in _CONDITION.findall(declared):
        if constant in values and bool(values[constant]) == (kind == "unless"):
            return []
    first = declared.split(" ")[0].rstrip(",")
    if first not in _DTYPES or " or " in declared:
        return []
    return [_DTYPES[first]]


@functools.cache
def compiled_operations() -> ModuleType:
    """Return kernels/triton/operations.py as a GPU would have it, also where Triton's interpreter is on.

    Its modules are a second copy; those that were imported before stay what they are.
    """
    package = vars(importlib.import_module(_KERNELS))
    before = {name: module for name, module in sys.modules.items() if name.startswith(_KERNELS)}
    members = package.copy()
    for name in before:
        if name not in (_KERNELS, f"{_KERNELS}.available"):
            del sys.modules[name]
    interpreted, triton.knobs.runtime.interpret = triton.knobs.runtime.interpret, False
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    try:
        return importlib.import_module(f"{_KERNELS}.operations")
    finally:
        triton.knobs.runtime.interpret = interpreted
        _copies.update({name: found for name, found in sys.modules.items() if name.startswith(_KERNELS)})
        for name in _copies:
            del sys.modules[name]
        sys.modules.update(before)
        package.clear()  # `from vllm_mp.kernels.triton import ...` looks here first
        package.update(members)


_copies: dict[str, ModuleType] = {}
"""The modules that `compiled_operations` has imported."""


def copy_of(name: str) -> ModuleType:
    """Return the module `name` of kernels/triton that `compiled_operations` uses."""
    compiled_operations()
    return _copies[f"{_KERNELS}.{name}"]
