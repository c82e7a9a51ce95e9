"""The embeddings that take the place of looked-up ones in a step, for prompts that are given as embeddings."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_mp.core.scheduler.batch import Batch
from vllm_mp.core.scheduler.step import ScheduledStep


class StepEmbeds(NamedTuple):
    """The embeddings of some tokens of a step, on the device."""

    indices: Tensor
    """Int64 [n], indexes into the tokens of the step."""
    values: Tensor
    """[n, hidden_size] in the model's dtype."""


def step_embeds(
    step: ScheduledStep, batch: Batch, dtype: torch.dtype, to_device: Callable[[npt.NDArray[Any]], Tensor]
) -> StepEmbeds | None:
    """Return the embeddings of the prompts in `step` that are given as embeddings; None if it has no such tokens."""
    rows = step.rows
    if not batch.has_prompt_embeds[rows].any():
        return None
    firsts = batch.num_computed_tokens[rows]
    given = np.flatnonzero(batch.has_prompt_embeds[rows] & (firsts < batch.num_prompt_tokens[rows]))
    if not len(given):
        return None
    starts = np.cumsum(step.counts) - step.counts
    indices, values = [], []
    for i in given.tolist():
        embeds = batch.request(int(rows[i])).prompt_embeds
        assert embeds is not None
        first = int(firsts[i])
        last = min(first + int(step.counts[i]), embeds.num_tokens)
        indices.append(np.arange(starts[i], starts[i] + last - first))
        chunk = to_device(np.frombuffer(embeds.rows(first, last), np.uint8).reshape(last - first, -1).copy())
        values.append(chunk.view(getattr(torch, embeds.dtype)).to(dtype))
    return StepEmbeds(to_device(np.concatenate(indices)), torch.cat(values))
