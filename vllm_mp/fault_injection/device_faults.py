"""Failures of a CUDA device, brought about on purpose.

The device finds out about the last two when it computes them, and whoever waits for it next is told.
"""

import torch

_OOM_ROOM = 2**29
"""Bytes of the device that are left to a core that runs out of them, whatever the device has."""
_BEYOND = 2**47
"""Bytes from anything in memory to where neither the device nor a process can have any."""


class _Array:
    """Bytes in the memory of the device, as `__cuda_array_interface__` describes them to torch."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (pointer, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 2,
        }


def run_out_of_memory() -> None:
    """Take memory of the device until there is none: of the core's own allowance, so that others keep theirs.

    Raises torch.OutOfMemoryError.
    """
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + _OOM_ROOM) / total))
    hoard = []
    while True:
        hoard.append(torch.empty(2**24, dtype=torch.uint8, device="cuda"))


def access_illegally() -> None:
    """Have the device write where it has no memory."""
    start = torch.zeros(1, device="cuda")
    wild = torch.as_tensor(_Array(start.data_ptr(), _BEYOND), device=start.device)
    wild[-1:].fill_(1)


def fail_an_assertion() -> None:
    """Have the device read the second of one element, against which torch's kernel asserts."""
    torch.zeros(1, device="cuda").index_select(0, torch.ones(1, dtype=torch.int64, device="cuda"))
