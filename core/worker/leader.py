"""What the model runner of rank 0 tells the other ranks, before it computes the same."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from vllm_mp.core.lora.adapter import Adapter
from vllm_mp.core.scheduler.batch import Batch
from vllm_mp.core.scheduler.step import ScheduledStep
from vllm_mp.core.worker.step_embeds import StepEmbeds


class Leader(Protocol):
    """Tells the other ranks what to compute, before this rank computes it."""

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
        ...

    def take(self, places: npt.NDArray[np.int64]) -> None:
        """Have the first stage of a pipeline take the next hidden states of the last stage, and keep those `places`."""
        ...

    def logits(self, sampling: int, places: npt.NDArray[np.int64]) -> None:
        """Ask for logits of the tokens at `places` of the latest step, in a pipeline of those that were kept."""
        ...

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Announce an adapter whose factors are broadcast next."""
        ...
