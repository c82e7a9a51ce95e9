"""The groups of ranks on GPUs, by torch.distributed and NCCL; on other machines by Gloo."""

import contextlib
import datetime
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._autograd import _enable_record_function

from vllm_mp.core.collectives.group import RankGroup
from vllm_mp.core.collectives.meeting_place import open_store, use_network_of
from vllm_mp.core.collectives.pipeline import Pipeline

_LOOK: Final = datetime.timedelta(seconds=0.1)
_POLL_S: Final = 0.01
_EXPLANATION_S: Final = 2.0
"""Time that `check` gets to say why an operation has failed."""

T = TypeVar("T")


class TorchGroup(RankGroup):
    """A process group of torch.distributed. On GPUs its sums can be captured in CUDA graphs."""

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        check: Callable[[], None],
        group: Any = None,
        first: int = 0,
    ) -> None:
        """`group` is the process group of the ranks from `first` on; by default that of all ranks.

        `check` is called now and then while this rank waits on a CPU; it may raise.
        """
        self.rank = rank
        self.size = size
        self._device = device
        self._check = check
        self._looks = device.type == "cpu"  # on a GPU its stream waits, and the host goes on
        self._group = group
        self._first = first

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._finish(dist.all_reduce(x, group=self._group, async_op=self._looks))
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        self._finish(dist.gather(x, parts, self._first, group=self._group, async_op=self._looks))
        return parts or []

    def broadcast(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._finish(dist.broadcast(x, self._first, group=self._group, async_op=self._looks))
        return x

    def minimum(self, value: int) -> int:
        values = torch.zeros(self.size, dtype=torch.int64, device=self._device)
        values[self.rank] = value
        work: Any = dist.all_reduce(values, group=self._group, async_op=True)
        while not work.is_completed():  # on GPUs too: the other ranks may still load, and one may hang
            self._check()
            time.sleep(_POLL_S)
        self._finish(work)
        return int(values.min())

    def divided(self, size: int) -> "TorchGroup":
        """Return the group of this rank, where each `size` ranks of this group, one after another, make a group.

        All ranks of all groups must call it; this must be the group of all ranks.
        """
        groups = [self.new_group(list(range(first, first + size))) for first in range(0, self.size, size)]
        stage = self.rank // size
        return TorchGroup(self.rank % size, size, self._device, self._check, groups[stage], stage * size)

    def new_group(self, ranks: list[int]) -> Any:
        """Return the process group of `ranks`; all ranks must call it, and this must be the group of all ranks."""
        return self.watched(lambda: dist.new_group(ranks))

    def wait(self, transfer: Any) -> None:
        """Wait for the end of a transfer between two ranks; on a GPU its stream waits."""
        with self.explained():
            self.watched(transfer.wait)

    def watched(self, run: Callable[[], T]) -> T:
        """Return what `run` returns; on a CPU another thread calls it, and this thread calls `check` now and then.

        This serves waits that cannot be cut into short ones: Gloo closes its connections if a wait for a transfer
        reaches a time limit. If `check` raises, the thread is left behind, and the process must end soon.
        """
        if not self._looks:
            return run()
        result: Future[T] = Future()

        def call() -> None:
            try:
                result.set_result(run())
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=call, name="rank-wait", daemon=True).start()
        while not wait([result], _LOOK.total_seconds()).done:
            self._check()
        return result.result()

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Give `check` the time to raise the reason if the block fails, which the core is about to learn."""
        try:
            yield
        except RuntimeError:  # another rank has ended
            deadline = time.monotonic() + _EXPLANATION_S
            while time.monotonic() < deadline:
                self._check()
                time.sleep(_LOOK.total_seconds())
            raise

    def _finish(self, work: Any) -> None:
        """Wait until an operation that was begun on a CPU is done; None on a GPU."""
        if work is None:
            return
        while not work.is_completed():
            with contextlib.suppress(RuntimeError):  # it has failed, or takes longer
                work.wait(_LOOK)
                return
            self._check()
        with self.explained():
            work.wait()

    def close(self) -> None:
        """Release what all groups of this process hold; no operation may follow."""
        dist.destroy_process_group()


def join_all_ranks(
    meeting_place: str,
    rank: int,
    size: int,
    device: torch.device,
    timeout_s: float,
    check: Callable[[], None] = lambda: None,
) -> TorchGroup:
    """Join the ranks that meet at `meeting_place`, as `open_store` reads it; return the group.

    An operation raises RuntimeError after `timeout_s` seconds, and if a rank has ended. `check` as for `TorchGroup`.
    """
    use_network_of(meeting_place)
    group = TorchGroup(rank, size, device, check)

    def join() -> None:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=open_store(meeting_place, size),
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )

    group.watched(join)
    return group


class TorchPipeline(Pipeline):
    """The stages whose ranks exchange hidden states by torch.distributed, without a wait of the host on GPUs."""

    def __init__(self, stage: int, num_stages: int, all_ranks: TorchGroup, device: torch.device) -> None:
        """All ranks must call it, after they have made the same other groups."""
        super().__init__(stage, num_stages, all_ranks)
        size = all_ranks.size // num_stages
        self._next = (all_ranks.rank + size) % all_ranks.size
        self._previous = (all_ranks.rank - size) % all_ranks.size
        self._device = device
        self._wait = all_ranks.wait
        self._explained = all_ranks.explained
        # With two stages, both directions have the same two ranks. In one process group, NCCL would run transfers in
        # one order, so that a step could not be sent before the result of the step before it has come.
        results = all_ranks.new_group(list(range(all_ranks.size)))
        self._to_next = results if self.is_last else None
        self._from_previous = results if self.is_first else None
        self._sent: deque[tuple[Any, Tensor]] = deque()
        """The latest transfers, with the tensors that must not be freed before they are done."""

    def send(self, hidden: Tensor) -> None:
        hidden = hidden.contiguous()
        with self._explained(), _not_recorded():
            self._sent.append((dist.isend(hidden, self._next, group=self._to_next), hidden))
        if len(self._sent) > self.num_stages:
            self._wait(self._sent.popleft()[0])

    def expect(self, shape: tuple[int, int], dtype: torch.dtype) -> Callable[[], Tensor]:
        hidden = torch.empty(shape, dtype=dtype, device=self._device)
        with self._explained(), _not_recorded():
            transfer: Any = dist.irecv(hidden, self._previous, group=self._from_previous)

        def take() -> Tensor:
            self._wait(transfer)
            return hidden

        return take


@contextlib.contextmanager
def _not_recorded() -> Iterator[None]:
    """Hide transfers that begin here from the profiler, whose memory they would write to when it has stopped."""
    _enable_record_function(False)
    try:
        yield
    finally:
        _enable_record_function(True)
