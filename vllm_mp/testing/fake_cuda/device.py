"""The calls of `torch.cuda` and of Triton's driver that the engine makes, for a device that does not exist."""

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.runtime.jit import JITFunction

from vllm_mp.kernels.triton import available
from vllm_mp.kernels.triton.launch import SHARED_BYTES
from vllm_mp.testing.fake_cuda.journal import FakeDevice
from vllm_mp.testing.fake_cuda.launches import FakeDriver, Launches, compiled_operations
from vllm_mp.testing.fake_cuda.tensors import fake_tensors

_TOTAL, _FREE = 80 * 2**30, 78 * 2**30
"""Bytes of memory."""


@contextlib.contextmanager
def fake_cuda(capability: tuple[int, int] = (9, 0)) -> Iterator[FakeDevice]:
    """Give this thread a CUDA device of `capability` in the block; `torch.device("cuda")` is it.

    What the engine makes in the block must not be used after it.
    """
    device = FakeDevice(capability)
    launches = Launches(device)
    find = available.operations
    driver = triton.runtime.driver
    with contextlib.ExitStack() as stack:
        for name, value in _of_torch(device).items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        for name in ("_cuda_clearCublasWorkspaces", "_host_emptyCache"):
            stack.enter_context(patch.object(torch._C, name, lambda: None, create=True))
        stack.enter_context(patch.object(torch._subclasses.fake_tensor, "init_gpu_context", lambda _: None))
        stack.enter_context(patch.object(driver, "_active", FakeDriver(capability)))
        stack.enter_context(patch.object(JITFunction, "_do_compile", launches.in_place_of_compiler()))
        stack.enter_context(
            patch.object(available, "operations", lambda kind: compiled_operations() if kind == "cuda" else find(kind))
        )
        # It would hash all of Triton for the compiler.
        stack.enter_context(patch.object(available, "prepare", lambda _: None))
        stack.enter_context(_device_guard())
        stack.enter_context(fake_tensors(device))
        yield device


def _of_torch(device: FakeDevice) -> dict[str, Any]:
    """Return what stands in for the attributes of `torch.cuda`, by name."""

    class Stream:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def wait_stream(self, other: object) -> None:
            pass

        def record_event(self) -> "Event":
            event = Event()
            event.record()
            return event

    class Event:
        def __init__(self, *_: object, **__: object) -> None:
            self._num_copies = 0

        def record(self) -> None:
            self._num_copies = device.num_copies

        def synchronize(self) -> None:
            device.wait("Event.synchronize", self._num_copies)

    class CUDAGraph:
        def __init__(self) -> None:
            self.replay = _not_captured

    @contextlib.contextmanager
    def capture(graph: CUDAGraph, *_: object, **__: object) -> Iterator[None]:
        device.begin_capture()
        try:
            yield
        finally:
            graph.replay = device.end_capture()

    def set_sync_debug_mode(mode: int | str) -> None:
        device.waits_raise = mode in (2, "error")

    properties = SimpleNamespace(
        name="a fake device",
        multi_processor_count=132,
        total_memory=_TOTAL,
        shared_memory_per_block_optin=SHARED_BYTES[9, 0],
        pci_domain_id=0,
        pci_bus_id=0,
        pci_device_id=0,
    )
    stream = Stream()
    return {
        "CUDAGraph": CUDAGraph,
        "Event": Event,
        "Stream": Stream,
        "current_device": lambda: 0,
        "current_stream": lambda *_: stream,
        "device_count": lambda: 1,
        "empty_cache": lambda: None,
        "get_device_capability": lambda *_: device.capability,
        "get_device_name": lambda *_: properties.name,
        "get_device_properties": lambda *_: properties,
        "get_sync_debug_mode": lambda: 2 if device.waits_raise else 0,
        "graph": capture,
        "graph_pool_handle": lambda: (0, 0),
        "is_available": lambda: True,
        "is_bf16_supported": lambda: True,
        "max_memory_allocated": lambda *_: 0,
        "mem_get_info": lambda *_: (_FREE, _TOTAL),
        "memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "set_device": lambda _: None,
        "set_sync_debug_mode": set_sync_debug_mode,
        "stream": lambda _: contextlib.nullcontext(),
        "synchronize": lambda *_: device.wait("torch.cuda.synchronize"),
    }


def _not_captured() -> None:
    raise RuntimeError("the graph was not captured")


@contextlib.contextmanager
def _device_guard() -> Iterator[None]:
    """Let torch's C++ code change to a CUDA device, which a build for CPUs cannot; the change does nothing.

    Indexing, for one, changes to the device of the tensor. Builds for CUDA have a guard of their own.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    cuda = 1  # of c10/core/DeviceType.h
    guards = (ctypes.c_void_p * (cuda + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before = guards[cuda]
    # torch has a guard that does nothing, and installs it in place of one that counts no devices. So this is an object
    # of C++ all of whose methods return 0, for the length of one call.
    method = ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)(lambda _: 0)
    methods = (ctypes.c_void_p * 64)(*[ctypes.cast(method, ctypes.c_void_p).value] * 64)
    none = ctypes.c_void_p(ctypes.addressof(methods))
    guards[cuda] = ctypes.addressof(none)
    torch._C._ensureCUDADeviceGuardSet()
    try:
        yield
    finally:
        guards[cuda] = before
