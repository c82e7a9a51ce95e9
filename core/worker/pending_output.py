"""The output of a launched step, before it is sampled and on the host."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_mp.core.scheduler.batch import Vector
from vllm_mp.core.scheduler.step import ModelOutput
from vllm_mp.core.worker.sampling.host_copies import HostCopies
from vllm_mp.core.worker.sampling.logprobs import Owned


class ChosenTokens(NamedTuple):
    """The results of a step that the host has computed and that has nothing but tokens."""

    tokens: npt.NDArray[np.int64]
    """[num_chosen], valid until the next step."""

    def sample(self) -> None:
        """Do nothing: the tokens are there."""

    def wait(self) -> ModelOutput:
        """Return the output."""
        return ModelOutput(self.tokens)


class PendingOutput:
    """The results of a step that the device may still be computing."""

    def __init__(
        self,
        sample: Callable[[], tuple[Tensor, Callable[[], list[Owned]]]],
        prompt_logprobs: Callable[[], list[Owned]],
        vectors: Callable[[], list[Vector]],
        copies: HostCopies,
    ) -> None:
        """`sample` returns the tokens [num_chosen], under way to the host, and a function for their log-probabilities.

        All results can be read once `copies` are complete.
        """
        self._sample = sample
        self._sampled: tuple[Tensor, Callable[[], list[Owned]]] | None = None
        self._prompt_logprobs = prompt_logprobs
        self._vectors = vectors
        self._copies = copies

    @torch.inference_mode()
    def sample(self) -> None:
        """Sample the step's tokens on the device. The batch is not read after this returns."""
        self._sampled = self._sample()
        self._copies.end()

    def wait(self) -> ModelOutput:
        """Wait until the device has computed the step, and return its output; sample it first if it is not sampled."""
        if self._sampled is None:
            self.sample()
        assert self._sampled is not None
        tokens, logprobs = self._sampled
        self._copies.wait()
        return ModelOutput(tokens.numpy(), logprobs(), self._prompt_logprobs(), self._vectors())
