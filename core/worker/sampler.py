"""From logits to tokens, for a whole batch at once."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_mp.core.scheduler.batch import Batch, Rows
from vllm_mp.core.worker.apply_rules import apply_rules
from vllm_mp.core.worker.host_copies import to_device
from vllm_mp.kernels import ops

NO_TOKEN = ops.NO_PLACE


class Sampler:
    """Greedy and random choice under each row's own parameters.

    The order of operations is vLLM's: the rules of `LogitRules`, then what `ops.sample` does. The number that it draws
    at is a function of the request's seed and the token's position alone. So a request draws the same numbers whatever
    else is in the batch, and a request that is taken up again in the middle goes on as if it had never stopped.
    """

    def __init__(self, batch: Batch, device: torch.device) -> None:
        self._batch = batch
        self._device = device

    def sample(self, logits: Tensor, rows: Rows) -> Tensor:
        """Token ids int64 [n] for `logits` [n, vocab] of the batch's `rows` [n]; `logits` may be overwritten.

        `NO_TOKEN` for a row that allows none: whose logits are not numbers, or all barred.
        """
        batch = self._batch
        if self._has_rules(rows):
            logits = logits.float().contiguous()
            apply_rules(logits, batch, rows)
        if not (batch.temperature[rows] > 0).any():
            return ops.argmax(logits)
        uniform = uniform_draws(batch.seed[rows], batch.num_tokens[rows] - batch.num_prompt_tokens[rows])
        columns = (batch.temperature[rows], batch.min_p[rows], batch.top_k[rows], batch.top_p[rows], uniform)
        return ops.sample(logits, *(to_device(column, self._device) for column in columns))

    def takes_highest(self, rows: Rows) -> bool:
        """Whether `sample` would give each of `rows` [n] what `ops.argmax` finds in its logits."""
        return not self._has_rules(rows) and not (self._batch.temperature[rows] > 0).any()

    def _has_rules(self, rows: Rows) -> bool:
        batch = self._batch
        return bool((batch.has_rules[rows] | (batch.num_tokens[rows] < batch.min_total_tokens[rows])).any())


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The output function of splitmix64 (Steele, Lea and Flood, 2014), a bijection of 64-bit words."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def uniform_draws(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1), [n], each a function of one seed and one output position.

    Of 52 bits, so that their product with a sum in float64 stays below the sum.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        state = _mix(seeds + golden) + (positions.astype(np.uint64) + np.uint64(1)) * golden
        return (_mix(_mix(state)) >> np.uint64(12)).astype(np.float64) * 2.0**-52
