"""The output of a step whose hidden states come back from the last stage of a pipeline."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_mp.core.scheduler.batch import Batch, Counts, Mask, Vector
from vllm_mp.core.scheduler.step import ModelOutput, ScheduledStep
from vllm_mp.core.worker.pending_output import PendingOutput

Finish = Callable[[ScheduledStep, Counts, Tensor], PendingOutput]
"""Returns the output of a step, from the number of tokens [num_rows] that were computed before it, and hidden states.

These are [num_tokens, hidden_size], or with `returns_all=False` [num_chosen, hidden_size] of the tokens after which one
is chosen.
"""


def returns_all(step: ScheduledStep, batch: Batch) -> bool:
    """Return whether the head needs the hidden states of all tokens of `step`, not only of rows that are sampled."""
    return bool(batch.is_pooled[step.rows].any() or (batch.num_prompt_logprobs[step.rows] >= 0).any())


class StagedOutput:
    """Stands for the output of a step that is on its way through the stages.

    It is finished when it is processed. Other steps have been launched in the meantime, and requests may have left
    their rows, which may have other requests by now: only the other rows are sampled.
    """

    def __init__(
        self,
        step: ScheduledStep,
        batch: Batch,
        needs_all: bool,
        take: Callable[[npt.NDArray[np.int64]], Tensor],
        finish: Finish,
    ) -> None:
        """`take` waits for the hidden states from the last stage, and returns those of some tokens among them."""
        self._step = step
        self._batch = batch
        self._needs_all = needs_all
        self._take = take
        self._finish = finish
        self._firsts = batch.num_computed_tokens[step.rows]
        self._tenancy = batch.tenancy[step.rows]

    def sample(self) -> None:
        """Do nothing: the tokens are sampled when the step is processed."""

    @torch.inference_mode()
    def wait(self) -> ModelOutput:
        """Wait for the hidden states of the step, sample the rows that still have their requests, and return all."""
        step, live = self._step, self._live()
        is_kept = np.repeat(live, step.counts) if self._needs_all else live[step.samples].repeat(step.num_choices)
        hidden = self._take(np.flatnonzero(is_kept))
        if not live.any():
            return _spread(ModelOutput(np.zeros(0, np.int64)), step, live)
        own = step if live.all() else step.of_rows(live)
        output = self._finish(own, self._firsts[live], hidden)
        output.sample()
        return _spread(output.wait(), step, live)

    def _live(self) -> Mask:
        """Return a mask [num_rows]: True if the row still has the request for which it was launched."""
        batch, rows = self._batch, self._step.rows
        live: Mask = np.isin(rows, batch.order) & (batch.tenancy[rows] == self._tenancy)
        return live


def _spread(output: ModelOutput, step: ScheduledStep, live: Mask) -> ModelOutput:
    """Return the output of the `live` rows as one of all rows; what the others get is discarded."""
    if live.all():
        return output
    is_live = live[step.samples].repeat(step.num_choices)
    tokens = np.zeros(len(is_live), np.int64)
    tokens[is_live] = output.tokens
    vectors = iter(output.vectors)
    nothing: Vector = np.zeros(0, np.float32)
    return output._replace(
        tokens=tokens, vectors=[next(vectors) if is_live else nothing for is_live in live[step.pools].tolist()]
    )
