"""The group of ranks on GPUs, by torch.distributed and NCCL; on other machines by Gloo."""

import datetime

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from vllm_mp.core.parallel.group import RankGroup, minimum_of


class TorchGroup(RankGroup):
    """The default process group of torch.distributed. On GPUs its sums can be captured in CUDA graphs."""

    def __init__(self, meeting_place: str, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        """Join the ranks that meet at the file `meeting_place`, in a folder that no other user can read.

        An operation raises RuntimeError after `timeout_s` seconds, and if a rank has ended.
        """
        self.rank = rank
        self.size = size
        self._device = device
        store = FileStore(meeting_place, size)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(x, parts)
        return parts or []

    def broadcast(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.broadcast(x, 0)
        return x

    def minimum(self, value: int) -> int:
        return minimum_of(self, value, self._device)

    def close(self) -> None:
        dist.destroy_process_group()
