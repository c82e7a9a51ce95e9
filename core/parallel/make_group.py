"""The choice of group and pipeline for the device of the ranks."""

import mmap
from collections.abc import Callable

import torch

from vllm_mp.config import VllmConfig
from vllm_mp.core.collectives import shared_group
from vllm_mp.core.collectives.group import RankGroup
from vllm_mp.core.collectives.pipeline import Pipeline, SharedMemoryPipeline
from vllm_mp.core.collectives.shared_group import SharedMemoryGroup
from vllm_mp.core.collectives.tensor_queue import TensorQueue
from vllm_mp.core.parallel.shared_memory import MemoryLayout


def make_group(
    config: VllmConfig,
    device: torch.device,
    rank: int,
    memory: mmap.mmap,
    layout: MemoryLayout,
    meeting_place: str,
    spins: bool,
    check: Callable[[], None] = lambda: None,
) -> tuple[RankGroup, Pipeline | None]:
    """Return the group of the stage of `rank`, and the pipeline if there are several stages.

    They go through shared memory on the CPUs of one machine that allow it, else through torch.distributed. `check` is
    called while the rank waits on a CPU for others; it may raise. `spins` as for `SharedMemoryGroup`.
    """
    size, num_stages = layout.tensor_size, layout.num_stages
    stage, rank_in_stage = divmod(rank, size)
    if device.type == "cpu" and shared_group.is_available() and config.parallel_config.nnodes == 1:
        group = SharedMemoryGroup(memory, layout.group_at(stage), rank_in_stage, size, check, spins)
        if num_stages == 1:
            return group, None
        all_ranks = SharedMemoryGroup(memory, layout.all_ranks_at, rank, layout.num_ranks, check, spins)
        received, sent = (
            TensorQueue(memory, layout.queue_at(reader), layout.queue_slots, layout.hidden_slot, check, spins)
            for reader in (rank, (rank + size) % layout.num_ranks)
        )
        return group, SharedMemoryPipeline(stage, num_stages, all_ranks, received, sent)
    # Imported here, because torch.distributed takes a while to import.
    from vllm_mp.core.collectives.torch_group import TorchPipeline, join_all_ranks

    limits = config.liveness_config
    timeout_s = max(limits.engine_iteration_timeout_s, limits.start_timeout_s)
    joined = join_all_ranks(meeting_place, rank, layout.num_ranks, device, timeout_s, check)
    if num_stages == 1:
        return joined, None
    return joined.divided(size), TorchPipeline(stage, num_stages, joined, device)
