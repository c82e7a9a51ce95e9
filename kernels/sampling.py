"""The choice of a token from logits, defined in plain torch: argmax, the sampling filters, the draw, log-probabilities.

A new filter is one field of `DrawParams`, one function and one line of `SAMPLING_FILTERS`. An implementation names the
filters that it fuses, and `filter_logits` runs the others before it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

NO_PLACE = -1
"""The result for a row that offers no choice: its highest value is not finite, or it holds NaN."""
_STRETCH = 256
"""The number of tokens in a part of the distribution; `invert_cumulative` first finds the part."""
_MAX_FILTERED_ELEMENTS = 1 << 22
"""Bound on the logits that `filter_logits` works on at a time: filters take many times the memory of their logits."""


class SamplingFilter(NamedTuple):
    """A cut of the distribution before the draw."""

    name: str
    """The field of `SamplingParams` and of `DrawParams` that the filter reads."""
    is_on: Callable[[Any], Any]
    """Takes that column, an array or a tensor [n]; returns booleans [n], True where the filter may bar a token."""
    bar: Callable[[Tensor, Tensor], None]
    """Write -inf, in place, over each token that the filter bars.

    Takes the logits divided by the temperature, float32 [n, vocab], with a row maximum of at most 0 and -inf for
    tokens that are barred already, and the column [n], on the same device. Rows that are off, or hold NaN, stay as
    they are. A filter that Triton does not fuse must not make the host wait for the device.
    """
    trial: float
    """A value with which the filter does all of its work, for the run that measures the sampler's memory."""


class DrawParams(NamedTuple):
    """How a token is chosen for each of n rows. The tensors are [n], on the device of the logits."""

    temperature: Tensor  # float32; 0 takes the most likely token
    typical_p: Tensor  # float32 in (0, 1]; 1 is off
    min_p: Tensor  # float32 in [0, 1]; 0 is off
    top_k: Tensor  # int64; 0 and below is off
    top_p: Tensor  # float32 in (0, 1]; 1 is off
    uniform: Tensor  # float64 in [0, 1) of at most 52 bits: where the draw inverts the cumulative distribution
    filters: tuple[SamplingFilter, ...]
    """The filters that are on in some row, in the order of `SAMPLING_FILTERS`.

    The host finds them in its own columns, so that skipping the others never waits for the device.
    """

    def rows(self, index: Tensor) -> "DrawParams":
        """Return the parameters of the rows `index` int64 [m]."""
        columns: dict[str, Any] = {name: column[index] for name, column in self._asdict().items() if name != "filters"}
        return self._replace(**columns)


class TokenMasks(NamedTuple):
    """Which tokens may be chosen in some of n rows of logits, as `ops.apply_token_masks` reads them."""

    masks: Tensor  # int32 [m, num_words]
    rows: Tensor  # int64 [m]: the row of the logits that each mask applies to


class Logprobs(NamedTuple):
    """The log-probabilities of n chosen tokens, and of the k most likely tokens beside each of them."""

    token_ids: Tensor  # int32 [n, 1 + k]: the chosen token, then the k most likely tokens, best first
    values: Tensor  # float32 [n, 1 + k]: the log-probabilities of `token_ids`
    ranks: Tensor  # int64 [n]: the rank of the chosen token, from 1 on; equally likely tokens share the best


def argmax(scores: Tensor) -> Tensor:
    """Return the index of the highest score in each row of `scores` [n, size], int64 [n]; the first of equal scores.

    `NO_PLACE` for a row whose highest score is not finite, or that holds NaN.
    """
    highest, indices = scores.max(dim=-1)
    return indices.masked_fill_(~highest.isfinite(), NO_PLACE)


def sample(logits: Tensor, params: DrawParams) -> Tensor:
    """Return a token for each row of `logits` [n, vocab], int64 [n]: the most likely one, or one drawn at random.

    A row with temperature 0 gets its most likely token. The logits of any other row are divided by the temperature,
    then each filter bars tokens from what the filter before it left. The draw inverts the cumulative distribution, in
    the order of token ids, at `params.uniform`.

    `NO_PLACE` for a row whose highest logit is not finite, or that holds NaN.
    """
    highest, tokens = logits.max(dim=-1)
    random = (params.temperature > 0).nonzero().squeeze(-1)
    if len(random) == len(logits):
        tokens = _draw(logits, highest, params)
    elif len(random):
        tokens[random] = _draw(logits[random], highest[random], params.rows(random))
    return tokens.masked_fill_(~highest.isfinite(), NO_PLACE)


def logprobs(logits: Tensor, chosen: Tensor, count: int) -> Logprobs:
    """Return the log-probabilities of `chosen` int64 [n] and of the most likely tokens, for `logits` [n, vocab].

    These are `count`, or the whole vocabulary if it is smaller. The order of equally likely tokens is not defined.
    NaN for a row whose highest logit is not finite, or that holds NaN.
    """
    chosen = chosen.unsqueeze(-1)
    distribution = logits.float().log_softmax(-1)
    own = distribution.gather(-1, chosen)
    ranks = (distribution > own).sum(-1) + 1
    best = distribution.topk(min(count, distribution.shape[-1]), dim=-1)
    ids = torch.cat((chosen, best.indices), -1).to(torch.int32)
    return Logprobs(ids, torch.cat((own, best.values), -1), ranks)


def filter_logits(logits: Tensor, params: DrawParams, filters: Sequence[SamplingFilter]) -> Tensor:
    """Return `logits` [n, vocab] as float32, with -inf for each token that `filters` bar.

    Rows with temperature 0, and rows that are not finite, stay as they are.
    """
    is_random = params.temperature > 0
    temperature = params.temperature.masked_fill(~is_random, 1.0)
    logits = logits.to(torch.float32, copy=True)
    num_rows = max(1, _MAX_FILTERED_ELEMENTS // logits.shape[-1])
    for start in range(0, len(logits), num_rows):
        rows = slice(start, start + num_rows)
        part = logits[rows]
        scaled = _scaled(part, part.amax(dim=-1), temperature[rows])
        for sampling_filter in filters:
            sampling_filter.bar(scaled, getattr(params, sampling_filter.name)[rows])
        part.masked_fill_((scaled == -torch.inf) & is_random[rows].unsqueeze(-1), -torch.inf)
    return logits


def _draw(logits: Tensor, highest: Tensor, params: DrawParams) -> Tensor:
    """Draw tokens int64 [n] for `logits` [n, vocab] whose maxima are `highest` [n]; no temperature is 0."""
    scaled = _scaled(logits.float(), highest.float(), params.temperature)
    for sampling_filter in params.filters:
        sampling_filter.bar(scaled, getattr(params, sampling_filter.name))
    return invert_cumulative(scaled.softmax(dim=-1), params.uniform.unsqueeze(-1))


def _scaled(logits: Tensor, highest: Tensor, temperature: Tensor) -> Tensor:
    """Return the logits, less their row maximum `highest` [n], divided by `temperature` [n].

    Because the maximum is subtracted first, no temperature is too low for float32.
    """
    return (logits - highest.unsqueeze(-1)) / temperature.unsqueeze(-1)


def _bar_atypical(scaled: Tensor, typical_p: Tensor) -> None:
    """Keep the tokens whose log-probability is closest to the mean (Meister et al. 2022, locally typical sampling).

    Bars all but the closest tokens whose probability reaches `typical_p`; ties with the last of them stay.
    """
    logprobs = scaled.log_softmax(dim=-1)
    probability = logprobs.exp()
    # Sums in float64, so that their order, which depends on the number of rows, makes no difference to the cut.
    entropy = torch.special.entr(probability).sum(dim=-1, keepdim=True, dtype=torch.float64).float()
    distance = (logprobs + entropy).abs_()
    ordered, index = distance.sort(dim=-1, stable=True)
    reached = probability.gather(-1, index).cumsum(dim=-1, dtype=torch.float64)
    last = (reached < typical_p.unsqueeze(-1)).sum(dim=-1, keepdim=True).clamp_(max=scaled.shape[-1] - 1)
    limit = ordered.gather(-1, last).masked_fill_((typical_p >= 1).unsqueeze(-1), torch.inf)
    scaled.masked_fill_(distance > limit, -torch.inf)


def _bar_below_min_p(scaled: Tensor, min_p: Tensor) -> None:
    """Bar tokens that are less likely than `min_p` times the most likely one (Nguyen et al. 2024)."""
    floor = scaled.amax(dim=-1, keepdim=True) + min_p.log().unsqueeze(-1)
    scaled.masked_fill_(scaled < floor, -torch.inf)


def _bar_below_top_k(scaled: Tensor, top_k: Tensor) -> None:
    """Bar tokens that are less likely than the `top_k`-th (Fan et al. 2018); ties with it stay."""
    limited = (top_k > 0) & (top_k < scaled.shape[-1])
    if not limited.any():
        return
    limits = top_k.masked_fill(~limited, 1)
    largest = scaled.topk(int(limits.max()), dim=-1).values
    floor = largest.gather(-1, limits.unsqueeze(-1) - 1)
    floor.masked_fill_(~limited.unsqueeze(-1), -torch.inf)
    scaled.masked_fill_(scaled < floor, -torch.inf)


def _bar_outside_top_p(scaled: Tensor, top_p: Tensor) -> None:
    """Bar all but the smallest set of tokens whose probability reaches `top_p` (Holtzman et al. 2020).

    Of equally likely tokens the first are kept.
    """
    top_p = top_p.unsqueeze(-1)
    ordered, index = scaled.sort(dim=-1, descending=True, stable=True)
    probability = ordered.softmax(dim=-1)
    before = probability.cumsum(dim=-1) - probability
    barred = (before >= top_p) & (top_p < 1)
    barred[:, 0] = False
    scaled.scatter_(-1, index, ordered.masked_fill_(barred, -torch.inf))


SAMPLING_FILTERS = (
    SamplingFilter("typical_p", lambda typical_p: typical_p < 1, _bar_atypical, trial=0.5),
    SamplingFilter("min_p", lambda min_p: min_p > 0, _bar_below_min_p, trial=0.5),
    SamplingFilter("top_k", lambda top_k: top_k > 0, _bar_below_top_k, trial=1),
    SamplingFilter("top_p", lambda top_p: top_p < 1, _bar_outside_top_p, trial=0.5),
)
"""All filters, in the order in which they apply, each to what the one before it left."""


def invert_cumulative(probability: Tensor, uniform: Tensor) -> Tensor:
    """Return the index int64 [n] at which the sum of `probability` float32 [n, size] passes `uniform` of the whole.

    `uniform` is float64 [n, 1] in [0, 1). No index has probability zero; for a row that holds NaN it is
    arbitrary. The stretch that holds the index is found first, then the index in the stretch: summing every element in
    float64 would take many times as long as the rest of the draw.
    """
    padding = -probability.shape[1] % _STRETCH
    stretches = F.pad(probability, (0, padding)) if padding else probability
    stretches = stretches.view(len(probability), -1, _STRETCH)
    ends = stretches.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target = uniform * ends[:, -1:]
    stretch = torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[1] - 1)
    before = F.pad(ends, (1, 0)).gather(-1, stretch)
    inside = stretches.gather(1, stretch.unsqueeze(-1).expand(-1, -1, _STRETCH)).squeeze(1)
    index = torch.searchsorted(before + inside.cumsum(dim=-1, dtype=torch.float64), target, right=True)
    # The two sums may differ in the last bit, so the target may lie past the end of the stretch.
    last = _STRETCH - 1 - (inside > 0).flip(-1).to(torch.uint8).argmax(dim=-1, keepdim=True)
    return (stretch * _STRETCH + torch.minimum(index, last)).squeeze(-1)
