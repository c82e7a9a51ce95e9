"""The choice of the group for the device of the ranks."""

import mmap
from collections.abc import Callable

import torch

from vllm_mp.config import VllmConfig
from vllm_mp.core.parallel import shared_group, shared_memory
from vllm_mp.core.parallel.group import RankGroup


def make_group(
    config: VllmConfig,
    device: torch.device,
    rank: int,
    memory: mmap.mmap,
    slot_bytes: int,
    meeting_place: str,
    spins: bool,
    check: Callable[[], None] = lambda: None,
) -> RankGroup:
    """Return the group of `rank`: through shared memory on CPUs that allow it, else by torch.distributed.

    `check` is called while the rank waits for others in shared memory; it may raise. `spins` as for
    `SharedMemoryGroup`.
    """
    size = config.parallel_config.tensor_parallel_size
    if device.type == "cpu" and shared_group.is_available():
        offset = shared_memory.group_offset(size, slot_bytes)
        return shared_group.SharedMemoryGroup(memory, offset, rank, size, check, spins)
    # Imported here, because torch.distributed takes a while to import.
    from vllm_mp.core.parallel.torch_group import TorchGroup

    limits = config.liveness_config
    timeout_s = max(limits.engine_iteration_timeout_s, limits.start_timeout_s)
    return TorchGroup(meeting_place, rank, size, device, timeout_s)
