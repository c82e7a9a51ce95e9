"""The interface of the logits processors that an operator registers with an engine; names and meanings are vLLM's.

The core loads the classes. This module needs no torch, so that a module of processors can be named anywhere.
"""

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from vllm_mp.config import VllmConfig
from vllm_mp.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch

RequestLogitsProcessor = Callable[..., Any]
"""Takes (output_token_ids, logits) or (prompt_token_ids, output_token_ids, logits), and returns logits [vocab_size]."""


class MoveDirectionality(Enum):
    """How a request moves within the batch of a processor."""

    UNIDIRECTIONAL = auto()
    """From the first index to the second, whose request has left."""
    SWAP = auto()
    """The requests at the two indexes are swapped."""


AddedRequest = tuple[int, SamplingParams, list[int] | None, list[int]]
"""(index, parameters, token ids of the prompt or None if it is given as embeddings, token ids of the output).

The list of output tokens grows as the request does."""
MovedRequest = tuple[int, int, MoveDirectionality]


@dataclass(frozen=True)
class BatchUpdate:
    """The changes of a processor's batch since its last step: first the added requests, then removed, then moved.

    An added request may take the index of a request that has left; that index is then not in `removed`.
    """

    batch_size: int
    removed: Sequence[int]
    added: Sequence[AddedRequest]
    moved: Sequence[MovedRequest]


class LogitsProcessor(ABC):
    """A change of the logits of a batch, with the state that it needs for each request.

    A request enters the batch with the tokens that it has so far: also after it was preempted, and after the death of a
    core. So its state must follow from parameters, prompt and output alone.
    """

    @classmethod  # noqa: B027, because most processors have nothing to check
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError for a request whose arguments (`sampling_params.extra_args`) this processor cannot use."""

    @abstractmethod
    def __init__(self, vllm_config: VllmConfig, device: "torch.device", is_pin_memory: bool) -> None:
        """`device` is that of the logits."""

    @abstractmethod
    def apply(self, logits: "torch.Tensor") -> "torch.Tensor":
        """Return `logits` float32 [batch_size, vocab_size] after the change, which may be made in place."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Return whether the most likely token of a row never changes.

        Such a processor is applied to random draws alone, after the temperature.
        """

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Note the changes of the batch before `apply`; None: there are none."""


class AdapterLogitsProcessor(LogitsProcessor):
    """A processor that calls a function for each request."""

    def __init__(self, vllm_config: VllmConfig, device: "torch.device", is_pin_memory: bool) -> None:
        self.req_info: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}
        """By index in the batch, the functions of the requests that have one."""

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """Return the function for a new request; None: its logits do not change."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.req_info, batch_update, self._new_state)

    def apply(self, logits: "torch.Tensor") -> "torch.Tensor":
        for index, process in self.req_info.items():
            row = logits[index]
            changed = process(row)
            if changed is not row:
                logits[index] = changed
        return logits

    def _new_state(
        self, params: SamplingParams, prompt_token_ids: list[int] | None, output_token_ids: list[int]
    ) -> Callable[["torch.Tensor"], "torch.Tensor"] | None:
        process = self.new_req_logits_processor(params)
        if process is None:
            return None
        takes_prompt = len(inspect.signature(process).parameters) == 3
        return functools.partial(process, *([prompt_token_ids] if takes_prompt else []), output_token_ids)


def process_dict_updates(
    req_entries: dict[int, Any],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], Any],
) -> bool:
    """Update `req_entries`, states by index in the batch, and return whether one has changed.

    `new_state` returns the state of an added request; None: it has none.
    """
    if batch_update is None:
        return False
    changed = False
    for index, params, prompt_token_ids, output_token_ids in batch_update.added:
        state = new_state(params, prompt_token_ids, output_token_ids)
        if state is not None:
            req_entries[index] = state
            changed = True
        elif req_entries.pop(index, None) is not None:
            changed = True
    for index in batch_update.removed:
        changed = req_entries.pop(index, None) is not None or changed
    for source, target, direction in batch_update.moved:
        moving, other = req_entries.pop(source, None), req_entries.pop(target, None)
        if moving is not None:
            req_entries[target] = moving
        if other is not None and direction == MoveDirectionality.SWAP:
            req_entries[source] = other
        changed = changed or moving is not None or other is not None
    return changed
