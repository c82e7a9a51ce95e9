"""The choice of tokens from logits, defined in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor

NO_PLACE = -1
_STRETCH = 256


def argmax(scores: Tensor) -> Tensor:
    """The place of the highest of each row of `scores` [n, size], int64 [n], the first of equal ones.

    `NO_PLACE` where the highest is not finite, or one is NaN.
    """
    highest, places = scores.max(dim=-1)
    return places.masked_fill_(~highest.isfinite(), NO_PLACE)


def sample(logits: Tensor, temperature: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """A token for each row of `logits` [n, vocab], int64 [n]: the highest, or one drawn at random.

    The other inputs are [n]. A row with `temperature` 0 (float32) gets its highest. Any other is divided by it, and
    what is barred, in this order, is what is less likely than `min_p` (float32) times the likeliest; what is less
    likely than the `top_k`-th (int64, 0 for no limit; ties with it stay); and all but the smallest set of tokens
    whose probability reaches `top_p` (float32; of equally likely ones, the first). The draw inverts the cumulative
    distribution, in the order of token ids, at `uniform`, float64 from 0 to below 1 with at most 52 bits.

    `NO_PLACE` for a row whose highest is not finite, or that has a NaN.
    """
    highest, tokens = logits.max(dim=-1)
    random = (temperature > 0).nonzero().squeeze(-1)
    if len(random) == len(logits):
        tokens = _draw(logits, highest, temperature, min_p, top_k, top_p, uniform)
    elif len(random):
        tokens[random] = _draw(*(x[random] for x in (logits, highest, temperature, min_p, top_k, top_p, uniform)))
    return tokens.masked_fill_(~highest.isfinite(), NO_PLACE)


def _draw(
    logits: Tensor,
    highest: Tensor,
    temperature: Tensor,
    min_p: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    uniform: Tensor,
) -> Tensor:
    """Tokens int64 [n], drawn for `logits` [n, vocab] whose maxima are `highest` [n]; see `sample`."""
    # Relative to the maximum, so that no temperature is too low for it.
    scaled = (logits.float() - highest.float().unsqueeze(-1)) / temperature.unsqueeze(-1)
    if (min_p > 0).any():
        # The highest is 0, so a probability below min_p times the highest is a value below log(min_p).
        scaled.masked_fill_(scaled < min_p.log().unsqueeze(-1), -torch.inf)
    if (top_k > 0).any():
        _keep_top_k(scaled, top_k)
    if (top_p < 1).any():
        _keep_top_p(scaled, top_p.unsqueeze(-1))
    return invert_cumulative(scaled.softmax(dim=-1), uniform.unsqueeze(-1))


def _keep_top_k(scaled: Tensor, top_k: Tensor) -> None:
    """Bar, in place, what is less likely than the k-th token; ties with it stay."""
    limited = (top_k > 0) & (top_k < scaled.shape[-1])
    if not limited.any():
        return
    limits = top_k.masked_fill(~limited, 1)
    largest = scaled.topk(int(limits.max()), dim=-1).values
    floor = largest.gather(-1, limits.unsqueeze(-1) - 1)
    floor.masked_fill_(~limited.unsqueeze(-1), -torch.inf)
    scaled.masked_fill_(scaled < floor, -torch.inf)


def _keep_top_p(scaled: Tensor, top_p: Tensor) -> None:
    """Bar, in place, all but the smallest set of tokens whose probability reaches `top_p` [n, 1]."""
    ordered, index = scaled.sort(dim=-1, descending=True, stable=True)
    probability = ordered.softmax(dim=-1)
    before = probability.cumsum(dim=-1) - probability
    barred = (before >= top_p) & (top_p < 1)
    barred[:, 0] = False
    scaled.scatter_(-1, index, ordered.masked_fill_(barred, -torch.inf))


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
