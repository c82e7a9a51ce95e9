"""From logits to tokens, for a whole batch at once."""

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_mp.core.apply_rules import apply_rules
from vllm_mp.core.batch import Batch, Rows
from vllm_mp.kernels import ops

NO_TOKEN = ops.NO_PLACE
_STRETCH = 256


class Sampler:
    """Greedy and random choice under each row's own parameters.

    The order of operations is vLLM's: the rules of `LogitRules`, then temperature, min-p, top-k, top-p. The draw
    inverts the cumulative distribution, in the order of token ids, at a number that is a function of the request's
    seed and the token's position alone. So a request draws the same numbers whatever else is in the batch, and a
    request that is taken up again in the middle goes on as if it had never stopped.
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
        highest, tokens = logits.max(dim=-1)
        random = np.flatnonzero(batch.temperature[rows] > 0)
        if len(random) == len(rows):
            tokens = self._draw(logits, highest, rows)
        elif len(random):
            index = torch.from_numpy(random).to(self._device)
            tokens[index] = self._draw(logits[index], highest[index], rows[random])
        return tokens.masked_fill_(~highest.isfinite(), NO_TOKEN)

    def takes_highest(self, rows: Rows) -> bool:
        """Whether `sample` would give each of `rows` [n] what `ops.argmax` finds in its logits."""
        return not self._has_rules(rows) and not (self._batch.temperature[rows] > 0).any()

    def _has_rules(self, rows: Rows) -> bool:
        batch = self._batch
        return bool((batch.has_rules[rows] | (batch.num_tokens[rows] < batch.min_total[rows])).any())

    def _draw(self, logits: Tensor, highest: Tensor, rows: Rows) -> Tensor:
        """Tokens int64 [n], drawn for `logits` [n, vocab] whose maxima are `highest` [n]."""
        batch = self._batch
        # Relative to the maximum, so that no temperature is too low for it.
        scaled = (logits.float() - highest.float().unsqueeze(-1)) / self._column(batch.temperature[rows])
        min_p, top_k, top_p = batch.min_p[rows], batch.top_k[rows], batch.top_p[rows]
        if (min_p > 0).any():
            # The highest is 0, so a probability below min_p times the highest is a value below log(min_p).
            scaled.masked_fill_(scaled < self._column(min_p).log(), -torch.inf)
        if (top_k > 0).any():
            self._keep_top_k(scaled, top_k)
        if (top_p < 1).any():
            self._keep_top_p(scaled, self._column(top_p))
        uniform = uniform_draws(batch.seed[rows], batch.num_tokens[rows] - batch.num_prompt[rows])
        return invert_cumulative(scaled.softmax(dim=-1), self._column(uniform))

    def _keep_top_k(self, scaled: Tensor, top_k: npt.NDArray[np.int64]) -> None:
        """Bar, in place, what is less likely than the k-th token; ties with it stay."""
        limits = np.where(top_k > 0, np.minimum(top_k, scaled.shape[-1]), scaled.shape[-1])
        limited = limits < scaled.shape[-1]
        if not limited.any():
            return
        largest = scaled.topk(int(limits[limited].max()), dim=-1).values
        last = torch.from_numpy(np.where(limited, limits, 1) - 1).to(self._device).unsqueeze(-1)
        floor = largest.gather(-1, last)
        floor.masked_fill_(torch.from_numpy(~limited).to(self._device).unsqueeze(-1), -torch.inf)
        scaled.masked_fill_(scaled < floor, -torch.inf)

    def _keep_top_p(self, scaled: Tensor, top_p: Tensor) -> None:
        """Bar, in place, all but the smallest set of tokens whose probability reaches `top_p` [n, 1]."""
        ordered, index = scaled.sort(dim=-1, descending=True, stable=True)
        probability = ordered.softmax(dim=-1)
        before = probability.cumsum(dim=-1) - probability
        barred = (before >= top_p) & (top_p < 1)
        barred[:, 0] = False
        scaled.scatter_(-1, index, ordered.masked_fill_(barred, -torch.inf))

    def _column(self, values: npt.NDArray[np.floating]) -> Tensor:
        return torch.from_numpy(values).to(self._device).unsqueeze(-1)


def invert_cumulative(probability: Tensor, uniform: Tensor) -> Tensor:
    """The index int64 [n] at which the sum of `probability` float32 [n, size] passes `uniform` [n, 1] of the whole.

    Never one of probability zero; any at all for a row that holds NaN. `uniform` is float64, from 0 to below 1. First
    the stretch is found and then the place in it, as adding up all in float64 would take many times as long as
    everything else about a draw.
    """
    padding = -probability.shape[1] % _STRETCH
    stretches = F.pad(probability, (0, padding)) if padding else probability
    stretches = stretches.view(len(probability), -1, _STRETCH)
    ends = stretches.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target = uniform * ends[:, -1:]
    stretch = torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[1] - 1)
    before = F.pad(ends, (1, 0)).gather(-1, stretch)
    inside = stretches.gather(1, stretch.unsqueeze(-1).expand(-1, -1, _STRETCH)).squeeze(1)
    place = torch.searchsorted(before + inside.cumsum(dim=-1, dtype=torch.float64), target, right=True)
    # The two sums may differ in the last bit.
    last = _STRETCH - 1 - (inside > 0).flip(-1).to(torch.uint8).argmax(dim=-1, keepdim=True)
    return (stretch * _STRETCH + torch.minimum(place, last)).squeeze(-1)


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
