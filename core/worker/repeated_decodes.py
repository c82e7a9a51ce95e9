"""A step of decodes that is computed again and again on the host."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_mp.core.models import PreparedStep
from vllm_mp.core.scheduler.step import ScheduledStep
from vllm_mp.core.worker.memory.model_memory import ModelMemory
from vllm_mp.core.worker.step_inputs import RepeatedInputs, StepRows
from vllm_mp.kernels import ops
from vllm_mp.kernels.ops import DrawParams


class RepeatedDecodes:
    """Computes a step that the scheduler returns again and again (`RepeatedStep`), with few calls beside the kernels.

    The model prepares the step if it can (`PreparedStep`), or else computes it as any other.
    """

    def __init__(self, step: ScheduledStep, block_size: int, memory: ModelMemory) -> None:
        """`memory` has the model, on the host; its caches must remain while the step is repeated."""
        self._memory = memory
        self._inputs = RepeatedInputs(step, block_size)
        self._cells: Tensor | None = None
        """The `cell_mapping` of the inputs that were prepared."""
        self._draws: PreparedDraws | None = None
        """Draws from the prepared step; None if there were none yet, or they cannot be prepared."""
        self._is_new = False
        """The step was prepared again since the last draws."""

    def compute(self, batch: StepRows) -> Tensor:
        """Return the hidden states of the next step [num_tokens, hidden_size], valid until the next call."""
        memory = self._memory
        if self._inputs.advance(batch):
            input_ids, positions, metadata = self._inputs.latest()
            memory.use_cells(metadata.cell_mapping)
            if metadata.cell_mapping is not self._cells:
                memory.prepare_step(input_ids, positions, metadata)
                self._cells, self._draws, self._is_new = metadata.cell_mapping, None, True
        if memory.prepared is None:
            input_ids, positions, metadata = self._inputs.latest()
            with torch.inference_mode():
                hidden: Tensor = memory.model(input_ids, positions, memory.kv_caches, metadata)
            return hidden
        for call in memory.prepared.forward:
            call()
        return memory.prepared.hidden

    def argmax(self) -> npt.NDArray[np.int64] | None:
        """Return what `CausalLM.argmax` returns for the hidden states [num_tokens], valid until the next step.

        None if the step is not prepared.
        """
        prepared = self._memory.prepared
        if prepared is None:
            return None
        prepared.argmax()
        return prepared.tokens

    def draw(self, params: DrawParams) -> npt.NDArray[np.int64] | None:
        """Return the tokens that are drawn for the hidden states [num_tokens], valid until the next step.

        Only the random numbers of `params` may be others than in the call before. None if draws are not prepared.
        """
        prepared = self._memory.prepared
        if prepared is None:
            return None
        if self._is_new:
            self._draws, self._is_new = PreparedDraws.of(prepared, params), False
        return None if self._draws is None else self._draws.tokens(params.uniform)


class PreparedDraws(NamedTuple):
    """Draws from the logits of a prepared step, by the same parameters each time but for the random numbers."""

    compute_logits: Callable[[], object]
    draw: Callable[[Tensor], object]
    drawn: Tensor
    """Int64 [num_tokens] what `draw` writes."""
    kept: Sequence[Any]
    """What owns the memory that the calls refer to."""

    @classmethod
    def of(cls, step: PreparedStep, params: DrawParams) -> "PreparedDraws | None":
        """Return the draws from `step`; None if they cannot be prepared."""
        prepared = step.prepare_logits()
        if prepared is None:
            return None
        compute_logits, logits = prepared
        drawn = torch.zeros(len(logits), dtype=torch.int64)
        draw = ops.prepare_draws(logits, params, drawn)
        return None if draw is None else cls(compute_logits, draw, drawn, (logits, params))

    def tokens(self, uniform: Tensor) -> npt.NDArray[np.int64]:
        """Return the tokens of the step as it has been computed; `uniform` are the random numbers [num_tokens]."""
        self.compute_logits()
        self.draw(uniform)
        return self.drawn.numpy()
