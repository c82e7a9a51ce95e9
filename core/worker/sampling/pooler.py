"""From hidden states to one vector per prompt: an embedding, or the probabilities of classes."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from vllm_mp.core.scheduler.batch import Batch, Counts, Vector
from vllm_mp.core.scheduler.step import ScheduledStep
from vllm_mp.core.worker.sampling.host_copies import ToHost, on_host
from vllm_mp.requests.pooling_params import PoolingParams

_MIN_LENGTH = 1e-12
"""Lower bound of the length by which vectors are divided, as in sentence-transformers."""


class Pooler:
    """Pools the hidden states of prompts, which may come in chunks, in float32.

    Each row keeps the partial result of its chunks. The first chunk of a prompt ignores it, so the partial result of an
    aborted or preempted request is never read.
    """

    def __init__(self, class_activation: str = "softmax") -> None:
        """`class_activation` is a member of `model_config.architecture.CLASS_ACTIVATIONS`."""
        self._class_activation = class_activation
        self._partial: dict[int, Tensor] = {}
        """Float32 [hidden_size] by row."""

    def pool(
        self,
        hidden: Tensor,
        step: ScheduledStep,
        batch: Batch,
        to_host: ToHost = on_host,
        classify: Callable[[Tensor], Tensor] | None = None,
        num_computed: Counts | None = None,
    ) -> Callable[[], list[Vector]]:
        """Return a function for the vectors of the rows that `step.pools` marks, in order.

        `hidden` is [num_tokens, hidden_size]. `classify` is the head of a model with classes: it returns
        [n, num_classes] for pooled states [n, hidden_size]. Must be called with every step in order. `num_computed`
        [num_rows] counts the tokens that were computed before the step, by default as `batch` does. Call the function
        once the copies of `to_host` are complete.
        """
        is_pooled = batch.is_pooled[step.rows]
        if not is_pooled.any():
            return list
        firsts = batch.num_computed_tokens[step.rows] if num_computed is None else num_computed
        pooled, ends = [], np.cumsum(step.counts)
        for i in np.flatnonzero(is_pooled).tolist():
            row, count = int(step.rows[i]), int(step.counts[i])
            states = hidden[int(ends[i]) - count : int(ends[i])]
            pooling = _pooling_of(batch, row)
            value = self._value(row, states, pooling.pooling_type, continues=bool(firsts[i]))
            if not step.pools[i]:
                # A copy, because a view would keep all hidden states of the step.
                self._partial[row] = value.to(torch.float32, copy=True)
            elif pooling.pooling_type == "mean":
                pooled.append(value / int(batch.num_prompt_tokens[row]))
            else:
                pooled.append(value.float())
        if not pooled:
            return list
        params = [_pooling_of(batch, row) for row in step.rows[step.pools].tolist()]
        values = torch.stack(pooled)
        vectors, classes = to_host(values), torch.zeros(0)
        chosen = [i for i, pooling in enumerate(params) if pooling.task == "classify"]
        if chosen and classify is not None:
            classes = to_host(classify(values[chosen]))

        def finish() -> list[Vector]:
            outputs: list[Vector] = [
                _finish(vector, pooling) for vector, pooling in zip(vectors.numpy(), params, strict=True)
            ]
            for i, outputs_of_head in zip(chosen, classes.numpy(), strict=True):
                activation = "none" if params[i].use_activation is False else self._class_activation
                outputs[i] = _activated(outputs_of_head, activation)
            return outputs

        return finish

    def _value(self, row: int, states: Tensor, pooling_type: str | None, continues: bool) -> Tensor:
        """Return `states` [count, hidden_size] pooled with earlier chunks, [hidden_size]; for "mean", their sum."""
        if pooling_type == "last":
            return states[-1]
        before = self._partial.pop(row) if continues else None
        if pooling_type == "cls":
            return states[0] if before is None else before
        total = states.sum(0, dtype=torch.float32)
        return total if before is None else before + total


def _pooling_of(batch: Batch, row: int) -> PoolingParams:
    """Return the pooling parameters of `row`; raise RuntimeError if its request generates."""
    pooling = batch.request(row).pooling
    if pooling is None:
        raise RuntimeError(f"row {row} has no pooling request")
    return pooling


def _activated(outputs: Vector, activation: str) -> Vector:
    """Return the probabilities or scores of `outputs` [num_classes] of a head."""
    if activation == "none":
        return outputs
    if activation == "sigmoid":
        probabilities = 1 / (1 + np.exp(-outputs.astype(np.float64)))
    else:
        weights = np.exp(outputs.astype(np.float64) - outputs.max())
        probabilities = weights / weights.sum()
    return probabilities.astype(np.float32)


def _finish(vector: Vector, pooling: PoolingParams) -> Vector:
    """Return `vector` [hidden_size] cut to the requested dimensions, then scaled to length 1 if requested."""
    vector = vector[: pooling.dimensions]
    if pooling.normalize:
        length = np.sqrt(np.square(vector, dtype=np.float64).sum())
        vector = (vector / max(length, _MIN_LENGTH)).astype(np.float32)
    return vector
