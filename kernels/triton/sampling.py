"""Argmax of a row, and draws from a filtered distribution.

No row is sorted. The limit that a value must reach to be kept is found by narrowing an interval: a k-ary search over
the bits of float32, which order like the numbers. Its sums, and the sum of the draw, run over the row in token order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_mp.kernels.sampling import NO_PLACE, DrawParams, filter_logits
from vllm_mp.kernels.triton.launch import Options, options

FUSED_FILTERS = frozenset({"min_p", "top_k", "top_p"})
"""The filters that the kernels apply themselves; they are the last of `SAMPLING_FILTERS`."""

_NO_PLACE = tl.constexpr(NO_PLACE)
_INFINITY = tl.constexpr(0x7F800000)
"""The bits of float32's infinity, above the bits of every finite number that is not negative."""
_PIVOTS = tl.constexpr(8)


def argmax(scores: Tensor) -> Tensor:
    """See `kernels.sampling.argmax`."""
    return _highest(scores, options("argmax", scores.device))[1]


def sample(logits: Tensor, params: DrawParams) -> Tensor:
    """See `kernels.sampling.sample`."""
    if remaining := [cut for cut in params.filters if cut.name not in FUSED_FILTERS]:
        logits = filter_logits(logits, params, remaining)
    num_rows, size = logits.shape
    launch = options("argmax", logits.device)
    highest, tokens = _highest(logits, launch)
    # How far each token is below the most likely one, as bits.
    depths = torch.empty((num_rows, size), dtype=torch.int32, device=logits.device)
    if num_rows:
        _depth_kernel[(num_rows, triton.cdiv(size, launch["ELEMENTS"]))](
            logits,
            highest,
            params.temperature,
            params.min_p.log(),
            depths,
            logits.stride(0),
            logits.stride(1),
            SIZE=size,
            **launch,
        )
        _sample_kernel[(num_rows,)](
            depths,
            params.temperature,
            params.top_k,
            params.top_p,
            params.uniform,
            tokens,
            SIZE=size,
            **options("sample", logits.device),
        )
    return tokens


def _highest(scores: Tensor, launch: Options) -> tuple[Tensor, Tensor]:
    """Return the highest score in each row of `scores` [n, size], float32 [n], and its index as `argmax` defines it."""
    num_rows, size = scores.shape
    num_parts = triton.cdiv(size, launch["ELEMENTS"])
    part_highest = torch.empty((num_rows, num_parts), dtype=torch.float32, device=scores.device)
    part_places = torch.empty((num_rows, num_parts), dtype=torch.int32, device=scores.device)
    highest = torch.empty(num_rows, dtype=torch.float32, device=scores.device)
    places = torch.empty(num_rows, dtype=torch.int64, device=scores.device)
    if num_rows:
        _part_highest_kernel[(num_rows, num_parts)](
            scores, part_highest, part_places, scores.stride(0), scores.stride(1), SIZE=size, PARTS=num_parts, **launch
        )
        _highest_kernel[(num_rows,)](
            part_highest,
            part_places,
            highest,
            places,
            PARTS=num_parts,
            PART_TILE=triton.next_power_of_2(num_parts),
            SIZE=size,
        )
    return highest, places


@triton.jit
def _part_highest_kernel(
    scores,
    part_highest,  # float32 [rows, PARTS], NaN for a part that has one
    part_places,  # int32 [rows, PARTS]
    row_stride,
    stride,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Find the highest of ELEMENTS scores of one row, and the first index that has it."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    place = part * ELEMENTS + tl.arange(0, ELEMENTS)
    score = tl.load(scores + row * row_stride + place * stride, mask=place < SIZE, other=float("-inf")).to(tl.float32)
    is_nan = score != score
    highest = tl.max(tl.where(is_nan, float("-inf"), score), 0)
    first = tl.min(tl.where((score == highest) & (place < SIZE), place, SIZE), 0)
    has_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    tl.store(part_highest + row * PARTS + part, tl.where(has_nan, float("nan"), highest))
    tl.store(part_places + row * PARTS + part, first)


@triton.jit
def _highest_kernel(
    part_highest,
    part_places,
    highest_out,
    places_out,
    PARTS: tl.constexpr,
    PART_TILE: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Combine the parts of one row."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PART_TILE)
    value = tl.load(part_highest + row * PARTS + part, mask=part < PARTS, other=float("-inf"))
    place = tl.load(part_places + row * PARTS + part, mask=part < PARTS, other=SIZE)
    is_nan = value != value
    highest = tl.max(tl.where(is_nan, float("-inf"), value), 0)
    first = tl.min(tl.where(value == highest, place, SIZE), 0)
    has_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    has_place = (tl.abs(highest) < float("inf")) & (has_nan == 0)
    tl.store(highest_out + row, highest)
    tl.store(places_out + row, tl.where(has_place, first, _NO_PLACE).to(tl.int64))


@triton.jit
def _depth_kernel(
    logits,
    highest,
    temperature,
    lowest_scaled,  # float32 [rows], below which a token is barred
    depths,
    row_stride,
    stride,
    SIZE: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Write how far ELEMENTS of one row are below its highest, over the temperature; infinity for barred tokens."""
    row = tl.program_id(0).to(tl.int64)
    row_temperature = tl.load(temperature + row)
    if row_temperature > 0.0:
        token = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
        logit = tl.load(logits + row * row_stride + token * stride, mask=token < SIZE, other=float("-inf"))
        below = logit.to(tl.float32) - tl.load(highest + row)
        scaled = tl.div_rn(below, tl.zeros_like(below) + row_temperature)
        depth = tl.where(scaled < tl.load(lowest_scaled + row), float("inf"), tl.abs(scaled))
        tl.store(depths + row * SIZE + token, depth.to(tl.int32, bitcast=True), mask=token < SIZE)


@triton.jit
def _weight(depth):
    """Return exp(-depth) from the bits of a depth."""
    return tl.exp(-depth.to(tl.float32, bitcast=True))


@triton.jit
def _narrowed(depths, goal, high, SIZE: tl.constexpr, ELEMENTS: tl.constexpr, COUNTS: tl.constexpr):
    """Return the least depth up to which the number of tokens (if COUNTS) or the sum of weights reaches `goal`.

    It is at most `high`, at which the goal is reached.
    """
    low = tl.full([], -1, tl.int32)
    number = tl.arange(0, _PIVOTS)
    while high - low > 1:
        step = tl.maximum((high - low) // _PIVOTS, 1)
        pivots = tl.minimum(low + step * (number + 1), high)
        pivots = tl.where(number == _PIVOTS - 1, high, pivots)
        reached = tl.zeros([_PIVOTS], tl.float32)
        for start in tl.range(0, SIZE, ELEMENTS):
            token = start + tl.arange(0, ELEMENTS)
            depth = tl.load(depths + token, mask=token < SIZE, other=_INFINITY)
            weight = tl.where(token < SIZE, 1.0, 0.0) if COUNTS else _weight(depth)
            reached += tl.sum(tl.where(depth[:, None] <= pivots[None, :], weight[:, None], 0.0), 0)
        enough = (reached >= goal) | (number == _PIVOTS - 1)
        low = tl.maximum(low, tl.max(tl.where(enough, low, pivots), 0))
        high = tl.min(tl.where(enough, pivots, high), 0)
    return high


@triton.jit
def _kept_weight(depths, token, deepest, last_tie, SIZE: tl.constexpr):
    """Return exp(-depth) of each `token`; 0 for tokens deeper than `deepest`, and at `deepest` after `last_tie`."""
    depth = tl.load(depths + token, mask=token < SIZE, other=_INFINITY)
    kept = (depth < deepest) | ((depth == deepest) & (token <= last_tie))
    return tl.where(kept, _weight(depth), 0.0)


@triton.jit
def _sample_kernel(
    depths,
    temperature,
    top_k,
    top_p,
    uniform,
    tokens,  # int64 [rows], which holds the highest of each row
    SIZE: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Draw for one row, unless its temperature is 0 or no token can be drawn."""
    row = tl.program_id(0).to(tl.int64)
    if (tl.load(temperature + row) == 0.0) | (tl.load(tokens + row) == _NO_PLACE):
        return
    depths += row * SIZE

    # Deeper tokens are barred, and tokens of the same depth after the last tie.
    deepest = tl.full([], _INFINITY, tl.int32)
    last_tie = tl.full([], SIZE, tl.int32)
    k = tl.load(top_k + row)
    if (k > 0) & (k < SIZE):
        deepest = _narrowed(depths, k.to(tl.float32), deepest, SIZE, ELEMENTS, COUNTS=True)
    p = tl.load(top_p + row)
    if p < 1.0:
        total = tl.full([], 0.0, tl.float32)
        for start in tl.range(0, SIZE, ELEMENTS):
            weight = _kept_weight(depths, start + tl.arange(0, ELEMENTS), deepest, last_tie, SIZE)
            total += tl.sum(weight, 0)
        goal = p * total
        deepest = _narrowed(depths, goal, deepest, SIZE, ELEMENTS, COUNTS=False)
        above = tl.full([], 0.0, tl.float32)
        num_ties = tl.full([], 0, tl.int32)
        for start in tl.range(0, SIZE, ELEMENTS):
            token = start + tl.arange(0, ELEMENTS)
            above += tl.sum(_kept_weight(depths, token, deepest, -1, SIZE), 0)
            depth = tl.load(depths + token, mask=token < SIZE, other=-1)
            num_ties += tl.sum((depth == deepest).to(tl.int32), 0)
        num_kept_ties = tl.maximum(tl.ceil((goal - above) / _weight(deepest)), 1.0)
        if num_kept_ties < num_ties:
            seen = tl.full([], 0, tl.int32)
            for start in tl.range(0, SIZE, ELEMENTS):
                token = start + tl.arange(0, ELEMENTS)
                depth = tl.load(depths + token, mask=token < SIZE, other=-1)
                tie = (depth == deepest).to(tl.int32)
                is_last = (tie > 0) & (seen + tl.cumsum(tie, 0) == num_kept_ties.to(tl.int32))
                last_tie = tl.minimum(last_tie, tl.min(tl.where(is_last, token, SIZE), 0))
                seen += tl.sum(tie, 0)

    total = tl.full([], 0.0, tl.float64)
    for start in tl.range(0, SIZE, ELEMENTS):
        weight = _kept_weight(depths, start + tl.arange(0, ELEMENTS), deepest, last_tie, SIZE)
        total += tl.sum(weight.to(tl.float64), 0)
    target = tl.load(uniform + row) * total
    start = tl.full([], 0, tl.int32)
    before = tl.full([], 0.0, tl.float64)
    token = tl.arange(0, ELEMENTS)
    weight = _kept_weight(depths, token, deepest, last_tie, SIZE).to(tl.float64)
    stretch = tl.sum(weight, 0)
    while (before + stretch <= target) & (start + ELEMENTS < SIZE):
        before += stretch
        start += ELEMENTS
        token = start + tl.arange(0, ELEMENTS)
        weight = _kept_weight(depths, token, deepest, last_tie, SIZE).to(tl.float64)
        stretch = tl.sum(weight, 0)
    passes = before + tl.cumsum(weight, 0) > target
    place = tl.min(tl.where(passes, token, SIZE), 0)
    # Sums of the stretch in different orders may differ in the last bit.
    last = tl.max(tl.where(weight > 0.0, token, -1), 0)
    tl.store(tokens + row, tl.minimum(place, last).to(tl.int64))
