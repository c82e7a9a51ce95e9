"""A step of decodes that is computed again and again on the host."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_mp.core.scheduler.step import ScheduledStep
from vllm_mp.core.worker.memory.model_memory import ModelMemory
from vllm_mp.core.worker.step_inputs import RepeatedInputs, StepRows


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

    def compute(self, batch: StepRows) -> Tensor:
        """Return the hidden states of the next step [num_tokens, hidden_size], valid until the next call."""
        memory = self._memory
        if self._inputs.advance(batch):
            input_ids, positions, metadata = self._inputs.latest()
            memory.use_cells(metadata.cell_mapping)
            if metadata.cell_mapping is not self._cells:
                memory.prepare_step(input_ids, positions, metadata)
                self._cells = metadata.cell_mapping
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
