"""Deliberate failures of a CUDA device.

A device that accesses memory illegally or fails an assertion detects this while it computes, and reports it at the
next synchronization.
"""

import torch

_OOM_HEADROOM_BYTES = 2**29
"""Device memory that a core may still allocate before it runs out of memory, however much the device has."""
_UNMAPPED_OFFSET_BYTES = 2**47
"""Distance from any allocation to addresses that neither a device nor a process can have."""


class _DeviceBytes:
    """Bytes in device memory, described to torch by `__cuda_array_interface__`."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (pointer, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 2,
        }


def run_out_of_memory() -> None:
    """Allocate device memory until none is left. The core's own share is limited first, so other processes keep theirs.

    Raises torch.OutOfMemoryError.
    """
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    allowed = torch.cuda.memory_reserved() + _OOM_HEADROOM_BYTES
    torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total))
    allocated = []
    while True:
        allocated.append(torch.empty(2**24, dtype=torch.uint8, device="cuda"))


def access_illegally() -> None:
    """Let the device write to an address without memory."""
    start = torch.zeros(1, device="cuda")
    unmapped = torch.as_tensor(_DeviceBytes(start.data_ptr(), _UNMAPPED_OFFSET_BYTES), device=start.device)
    unmapped[-1:].fill_(1)


def fail_an_assertion() -> None:
    """Let the device read index 1 of a tensor with one element, which an assertion in torch's kernel forbids."""
    torch.zeros(1, device="cuda").index_select(0, torch.ones(1, dtype=torch.int64, device="cuda"))
