"""The other ranks of a core, as rank 0 leads them: steps, logits, adapters and calls, in the order of the ring."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from vllm_mp.config import VllmConfig
from vllm_mp.core.collectives.group import RankGroup
from vllm_mp.core.collectives.pipeline import Pipeline
from vllm_mp.core.lora.adapter import Adapter
from vllm_mp.core.parallel.make_group import make_group
from vllm_mp.core.parallel.messages import AdapterTable, Call, Kind
from vllm_mp.core.parallel.rank_watch import watch_ranks
from vllm_mp.core.parallel.ranks import Ranks
from vllm_mp.core.scheduler.batch import Batch
from vllm_mp.core.scheduler.step import ScheduledStep
from vllm_mp.core.stop_signal import StopSignal
from vllm_mp.core.worker.memory.sleep import Memory, MemoryLostError
from vllm_mp.core.worker.profiler import Profiler
from vllm_mp.core.worker.step_embeds import StepEmbeds
from vllm_mp.core.worker.step_message import StepEncoder

_KINDS = {kind: int(kind).to_bytes(8, "little") for kind in Kind}


class Followers:
    """Tells the ranks 1 and up what to compute; it is a `vllm_mp.core.worker.leader.Leader`."""

    def __init__(self, ranks: Ranks, max_num_seqs: int) -> None:
        self._ranks = ranks
        self._encoder = StepEncoder(max_num_seqs)
        self._num_calls = 0

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

    def step(
        self,
        step: ScheduledStep,
        batch: Batch,
        sampling: int,
        isolates: bool,
        embeds: StepEmbeds | None,
        returns_all: bool = False,
    ) -> None:
        """Send a step, with what to compute of the logits of its sampled rows; see `StepMessage`."""
        embedded = None if embeds is None else embeds.places.cpu().numpy()
        self._write(Kind.STEP, *self._encoder.encode(step, batch, sampling, isolates, embedded, returns_all))

    def take(self, indices: npt.NDArray[np.int64]) -> None:
        """Have the first stage of a pipeline take the last stage's next hidden states, and keep those at `indices`."""
        self._write(Kind.TAKE, indices.tobytes())

    def logits(self, sampling: int, indices: npt.NDArray[np.int64]) -> None:
        """Ask for logits of the tokens at `indices` of the latest step, in a pipeline of those that were kept."""
        self._write(Kind.LOGITS, np.array([sampling, *indices.tolist()], np.int64).tobytes())

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Announce an adapter whose factors are broadcast next."""
        factors = list(adapter.factors.values())
        table = AdapterTable(
            parts=list(adapter.factors),
            shapes=[(*of_part.a.shape, *of_part.b.shape) for of_part in factors],
            dtype=str(factors[0].a.dtype).removeprefix("torch."),
        )
        self.call("load_adapter", slot, msgspec.to_builtins(table))

    def call(self, method: str, *arguments: Any) -> int:
        """Have the other ranks run a method of `core.parallel.follower`; return the number of the call."""
        self._num_calls += 1
        call = Call(number=self._num_calls, method=method, arguments=list(arguments))
        self._write(Kind.CALL, msgspec.msgpack.encode(call))
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

    def _write(self, kind: Kind, *parts: bytes) -> None:
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
