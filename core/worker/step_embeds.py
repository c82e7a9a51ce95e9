"""The embeddings that take the place of looked-up ones in a step: of prompts that are given so, and of images."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_mp.core.scheduler.batch import Batch
from vllm_mp.core.scheduler.request import Request
from vllm_mp.core.scheduler.step import ScheduledStep

ToDevice = Callable[[npt.NDArray[Any]], Tensor]


class StepEmbeds(NamedTuple):
    """The embeddings of some tokens of a step, on the device."""

    indices: Tensor
    """Int64 [n], indexes into the tokens of the step."""
    values: Tensor
    """[n, hidden_size] in the model's dtype."""


def step_embeds(step: ScheduledStep, batch: Batch, dtype: torch.dtype, to_device: ToDevice) -> StepEmbeds | None:
    """Return the embeddings of `step` that are not looked up; None if it has no such tokens.

    The images that it needs must be encoded.
    """
    rows = step.rows
    if not batch.has_embeds[rows].any():
        return None
    firsts = batch.num_computed_tokens[rows]
    given = np.flatnonzero(batch.has_embeds[rows] & (firsts < batch.num_prompt_tokens[rows]))
    starts = np.cumsum(step.counts) - step.counts
    indices, values = [], []
    for i in given.tolist():
        first = int(firsts[i])
        for position, chunk in _given(batch.request(int(rows[i])), first, first + int(step.counts[i]), dtype):
            begin = int(starts[i]) + position - first
            indices.append(np.arange(begin, begin + len(chunk)))
            values.append(_on_device(chunk, to_device))
    if not indices:
        return None
    return StepEmbeds(to_device(np.concatenate(indices)), torch.cat(values))


def _given(request: Request, first: int, last: int, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """Yield (position, embeddings [n, hidden_size] in `dtype` on the host) of the tokens [first, last)."""
    if (embeds := request.prompt_embeds) is not None:
        last = min(last, embeds.num_tokens)
        chunk = np.frombuffer(embeds.rows(first, last), np.uint8).reshape(last - first, -1).copy()
        yield first, torch.from_numpy(chunk).view(getattr(torch, embeds.dtype)).to(dtype)
    elif request.images is not None:
        for part in request.images.parts(first, last):
            chunks = part.image.embeddings(part.offset, part.offset + part.num_tokens)
            yield part.position, torch.cat(chunks).to(dtype)


def _on_device(values: Tensor, to_device: ToDevice) -> Tensor:
    """Return `values` [n, hidden_size] on the device."""
    return to_device(values.contiguous().view(torch.uint8).numpy()).view(values.dtype)
