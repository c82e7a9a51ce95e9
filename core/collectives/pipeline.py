"""The stages of a pipeline, as a rank of one of them sees its neighbours.

Rank t of a stage sends hidden states to rank t of the next stage, and rank t of the last stage to rank t of the first,
which has the head. All steps take this way in the same order.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_mp.core.collectives.group import RankGroup
from vllm_mp.core.collectives.tensor_queue import TensorQueue


class Pipeline:
    """The position of a rank in the pipeline, and its connections."""

    def __init__(self, stage: int, num_stages: int, all_ranks: RankGroup) -> None:
        """`all_ranks` is the group of the ranks of all stages."""
        self.stage = stage
        self.num_stages = num_stages
        self.all_ranks = all_ranks

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    def send(self, hidden: Tensor) -> None:
        """Send hidden states [n, hidden_size] to the next stage; they must not change until they have arrived."""
        raise NotImplementedError

    def expect(self, shape: tuple[int, int], dtype: torch.dtype) -> Callable[[], Tensor]:
        """Return a function that waits for the next hidden states of the stage before, of this shape and dtype.

        The functions must be called in the order in which they were returned.
        """
        raise NotImplementedError


class SharedMemoryPipeline(Pipeline):
    """The stages on CPUs of one machine, with a queue for each rank."""

    def __init__(
        self, stage: int, num_stages: int, all_ranks: RankGroup, received: TensorQueue, sent: TensorQueue
    ) -> None:
        """`received` is read here, `sent` by the next stage."""
        super().__init__(stage, num_stages, all_ranks)
        self._received = received
        self._sent = sent

    def send(self, hidden: Tensor) -> None:
        self._sent.put(hidden)

    def expect(self, shape: tuple[int, int], dtype: torch.dtype) -> Callable[[], Tensor]:
        return lambda: self._received.take(shape, dtype)
