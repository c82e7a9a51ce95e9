"""The way of the hidden states of a step through the stages of a pipeline, as a rank of one stage sees it."""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_mp.core.collectives.pipeline import Pipeline
from vllm_mp.core.scheduler.step import ScheduledStep
from vllm_mp.core.worker.step_embeds import StepEmbeds
from vllm_mp.core.worker.step_inputs import StepRows

Compute = Callable[[ScheduledStep, StepRows, StepEmbeds | None, Tensor | None], Tensor]
"""Computes the layers of the stage, from what the stage before has sent (None in the first stage)."""


class StagedSteps:
    """Receives, computes and sends the hidden states of steps, all of them in order."""

    def __init__(
        self,
        pipeline: Pipeline,
        hidden_size: int,
        dtype: torch.dtype,
        to_device: Callable[[npt.NDArray[Any]], Tensor],
        compute: Compute,
    ) -> None:
        """`dtype` is that of the hidden states."""
        self._pipeline = pipeline
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._to_device = to_device
        self._compute = compute
        self._expected: deque[Callable[[], Tensor]] = deque()
        """Wait for hidden states from the last stage."""

    def run(self, step: ScheduledStep, rows: StepRows, embeds: StepEmbeds | None, needs_all: bool) -> Tensor:
        """Compute the layers of this stage for `step`, send the hidden states on, and return them.

        The last stage sends those after which tokens are chosen, or with `needs_all` those of all tokens.
        """
        total = int(step.counts.sum())
        received = None if self._pipeline.is_first else self._expect(total)()
        hidden = self._compute(step, rows, embeds, received)
        if self._pipeline.is_last and not needs_all:
            hidden = hidden[self._to_device(step.chosen_indices())]
        self._pipeline.send(hidden)
        if self._pipeline.is_first:
            self._expected.append(self._expect(total if needs_all else int(step.num_choices.sum())))
        return hidden

    def take(self, indices: npt.NDArray[np.int64]) -> Tensor:
        """Wait for the next hidden states from the last stage; return those at `indices`. The first stage calls it."""
        hidden = self._expected.popleft()()
        return hidden if len(indices) == len(hidden) else hidden[self._to_device(indices)]

    def _expect(self, count: int) -> Callable[[], Tensor]:
        return self._pipeline.expect((count, self._hidden_size), self._dtype)
