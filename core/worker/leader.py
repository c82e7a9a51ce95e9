"""What the model runner of rank 0 tells the other ranks, before it computes the same."""

import enum
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_mp.core.lora.adapter import Adapter
from vllm_mp.core.scheduler.batch import Batch
from vllm_mp.core.scheduler.step import ScheduledStep
from vllm_mp.core.worker.step_embeds import StepEmbeds
from vllm_mp.core.worker.step_message import StepEncoder


class Kind(enum.IntEnum):
    """The first 8 bytes of a message to the other ranks."""

    STEP = 1
    LOGITS = 2
    CALL = 3
    TAKE = 4


class AdapterTable(msgspec.Struct, kw_only=True):
    """The shapes of the factors of an adapter, which are broadcast in this order."""

    parts: list[str]
    shapes: list[tuple[int, int, int, int]]
    """[rank, inputs] and [outputs, rank] of each part."""
    dtype: str


class Leader:
    """Tells the other ranks what to compute, before this rank computes it."""

    def __init__(self, write: Callable[[Kind, list[bytes]], None], call: Callable[..., Any], max_num_seqs: int) -> None:
        """`write` sends the parts of a message to all other ranks. `call(method, *arguments)` has them run a method."""
        self._write = write
        self._call = call
        self._encoder = StepEncoder(max_num_seqs)

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
        indices = None if embeds is None else embeds.places.cpu().numpy()
        self._write(Kind.STEP, self._encoder.encode(step, batch, sampling, isolates, indices, returns_all))

    def take(self, indices: npt.NDArray[np.int64]) -> None:
        """Have the first stage take the next hidden states of the last stage, and keep those of tokens `indices`."""
        self._write(Kind.TAKE, [indices.tobytes()])

    def logits(self, sampling: int, indices: npt.NDArray[np.int64]) -> None:
        """Ask for logits of the tokens `indices` of the latest step, in a pipeline of those that were kept."""
        self._write(Kind.LOGITS, [np.array([sampling, *indices.tolist()], np.int64).tobytes()])

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Announce an adapter whose factors are broadcast next."""
        factors = list(adapter.factors.values())
        table = AdapterTable(
            parts=list(adapter.factors),
            shapes=[(*of_part.a.shape, *of_part.b.shape) for of_part in factors],
            dtype=str(factors[0].a.dtype).removeprefix("torch."),
        )
        self._call("load_adapter", slot, msgspec.to_builtins(table))
