"""The other ranks of a core, as rank 0 leads them: steps, logits, adapters and calls, in the order of the ring."""

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from vllm_mp.config import VllmConfig
from vllm_mp.core.collectives.group import RankGroup
from vllm_mp.core.collectives.pipeline import Pipeline
from vllm_mp.core.parallel.make_group import make_group
from vllm_mp.core.parallel.messages import Call
from vllm_mp.core.parallel.rank_watch import watch_ranks
from vllm_mp.core.parallel.ranks import Ranks
from vllm_mp.core.stop_signal import StopSignal
from vllm_mp.core.worker.leader import Kind, Leader
from vllm_mp.core.worker.memory.sleep import Memory, MemoryLostError
from vllm_mp.core.worker.profiler import Profiler

_KINDS = {kind: int(kind).to_bytes(8, "little") for kind in Kind}


class Followers:
    """The ranks 1 and up, as rank 0 calls them; `leader` tells them what to compute of each step."""

    def __init__(self, ranks: Ranks, max_num_seqs: int) -> None:
        self._ranks = ranks
        self._num_calls = 0
        self.leader = Leader(self._write, self.call, max_num_seqs)

    @property
    def pids(self) -> list[int]:
        """The processes of the ranks 1 and up, each on its machine."""
        return self._ranks.pids

    @property
    def machines(self) -> list[str]:
        """The names of the other machines, by their number from 1 on."""
        return self._ranks.machines

    @property
    def descriptors(self) -> list[int]:
        """Descriptors that become readable when a rank has ended or failed."""
        return self._ranks.descriptors

    def look(self) -> None:
        """Raise WorkerFailedError if a rank has ended or failed."""
        self._ranks.look()

    def call(self, method: str, *arguments: Any) -> int:
        """Have the other ranks run a method of `core.parallel.follower`; return the number of the call."""
        self._num_calls += 1
        call = Call(number=self._num_calls, method=method, arguments=list(arguments))
        self._write(Kind.CALL, [msgspec.msgpack.encode(call)])
        return self._num_calls

    def results(self, number: int) -> list[Any]:
        """Wait for the results of a call by rank; raise RuntimeError, naming the rank, if it has failed on one."""
        replies = self._ranks.replies(number)
        for rank, reply in enumerate(replies, 1):
            if reply.error is not None:
                raise RuntimeError(f"rank {rank}: {reply.error}")
        return [reply.result for reply in replies]

    def run(self, method: str, *arguments: Any) -> list[Any]:
        """Return the results of a method by rank; raise ValueError, naming the rank, if it has failed on one."""
        try:
            return self.results(self.call(method, *arguments))
        except RuntimeError as error:
            raise ValueError(str(error)) from error

    def _write(self, kind: Kind, parts: list[bytes]) -> None:
        self._ranks.write([_KINDS[kind], *parts])


class GroupMemory:
    """The memory of all ranks, which sleep and wake up together; it is a `vllm_mp.core.worker.memory.sleep.Memory`."""

    def __init__(self, own: Memory, followers: Followers) -> None:
        self._own = own
        self._followers = followers

    def offload_weights(self) -> None:
        try:
            self._on_all_ranks("offload_weights", self._own.offload_weights)
        except RuntimeError as refusal:
            why = str(refusal)
        else:
            return
        # Outside of `except`, because the error's frames refer to memory that the restore may need.
        try:
            self.restore_weights()
        except RuntimeError as error:
            raise MemoryLostError(
                f"not all ranks can move their weights to host memory ({why}), and not all can restore them: {error}"
            ) from error
        raise RuntimeError(why)

    def drop_weights(self) -> None:
        self._on_all_ranks("drop_weights", self._own.drop_weights)

    def restore_weights(self) -> None:
        self._on_all_ranks("restore_weights", self._own.restore_weights)

    def drop_cache(self) -> None:
        self._on_all_ranks("drop_cache", self._own.drop_cache)

    def restore_cache(self) -> None:
        self._on_all_ranks("restore_cache", self._own.restore_cache)

    def prepare(self) -> None:
        self._on_all_ranks("prepare", self._own.prepare)

    def _on_all_ranks(self, method: str, run: Callable[[], None]) -> None:
        """Run a method here and on the other ranks at the same time; raise what it raises here, else RuntimeError."""
        number = self._followers.call(method)
        try:
            run()
        except BaseException:
            self._followers.results(number)
            raise
        self._followers.results(number)


class GroupProfiler(Profiler):
    """The profilers of all ranks; each writes its own trace into the same folder."""

    def __init__(self, device: torch.device, followers: Followers) -> None:
        super().__init__(device)
        self.followers = followers

    def start(self) -> None:
        super().start()
        try:
            self.followers.run("start_profile")
        except ValueError:  # the ranks that did start must not stay on
            self.discard()
            raise

    def stop(self, folder: str | None = None) -> str:
        try:
            written = super().stop(folder)
        except Exception:
            self.followers.run("discard_profile")
            raise
        self.followers.run("stop_profile", written)
        return written

    def discard(self) -> None:
        super().discard()
        self.followers.run("discard_profile")


def lead(
    config: VllmConfig, ranks: Ranks, device: torch.device, stop: StopSignal
) -> tuple[RankGroup, Pipeline | None, Followers]:
    """Wait until the other ranks have joined; return group and pipeline, and what rank 0 leads the ranks with.

    Raises ValueError if a rank cannot join, and StopSignal.Stopped if the core is told to stop.
    """
    ranks.join(config, stop.raise_if_set)
    if device.type == "cuda":
        watch_ranks(ranks.look, ranks.closing)
    local = ranks.local
    group, pipeline = make_group(
        config,
        device,
        0,
        local.memory,
        local.layout,
        ranks.meeting_place.address,
        local.has_own_cpus,
        ranks.check,
    )
    return group, pipeline, Followers(ranks, config.scheduler_config.max_num_seqs)
