"""Argmax of a row, and draws from a filtered distribution.

No row is sorted. The limit that a value must reach to be kept is found by narrowing an interval: a k-ary search over
the bits of float32, which order like the numbers. Several programs a row first count the tokens by the integer part of
their depth below the most likely one, which bounds the interval. They list the tokens down to its end, usually a few
hundred, so that one program can narrow it within one tile. If the list would be too long, it goes through the whole
row. All sums run in token order.
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
_BINS = tl.constexpr(16)
"""Tokens are counted by the integer part of their depth; the last bin has all deeper ones too."""
_ALIGNED = 16
"""Rows of depths, and lists, are filled up to a multiple of this, so that they are read in whole vectors."""
_SURE = tl.constexpr(1e-3)
"""The share by which a bound must differ from a sum of weights that is rounded, so that the bound is sure."""


def argmax(scores: Tensor) -> Tensor:
    """See `kernels.sampling.argmax`."""
    return _highest(scores, options("argmax", scores.device))[1]


def sample(logits: Tensor, params: DrawParams) -> Tensor:
    """See `kernels.sampling.sample`."""
    if remaining := [cut for cut in params.filters if cut.name not in FUSED_FILTERS]:
        logits = filter_logits(logits, params, remaining)
    num_rows, size = logits.shape
    launch, of_draw = options("argmax", logits.device), options("sample", logits.device)
    highest, tokens = _highest(logits, launch)
    if not num_rows:
        return tokens
    # How far each token is below the most likely one, as bits; after each row its list.
    width = triton.cdiv(size, _ALIGNED) * _ALIGNED
    depths = torch.empty((num_rows, width + of_draw["LIST"]), dtype=torch.int32, device=logits.device)
    listed = torch.empty((num_rows, of_draw["LIST"]), dtype=torch.int32, device=logits.device)
    num_parts = triton.cdiv(size, launch["ELEMENTS"])
    counts = torch.empty((num_rows, num_parts, _BINS.value), dtype=torch.int32, device=logits.device)
    sums = torch.empty((num_rows, num_parts), dtype=torch.float32, device=logits.device)
    sizes = {"SIZE": size, "WIDTH": width, "LIST": of_draw["LIST"], "PARTS": num_parts}
    grid = (num_rows, num_parts)
    _depth_kernel[grid](
        logits,
        highest,
        params.temperature,
        params.min_p.log(),
        params.top_k,
        params.top_p,
        depths,
        counts,
        sums,
        logits.stride(0),
        logits.stride(1),
        **sizes,
        **launch,
    )
    sizes["PART_TILE"] = triton.next_power_of_2(num_parts)
    filtered = (params.temperature, params.top_k, params.top_p, counts, sums, depths, listed)
    if any(cut.name in ("top_k", "top_p") for cut in params.filters):
        _list_kernel[grid](*filtered, **sizes, **launch)
    _sample_kernel[(num_rows,)](*filtered, params.uniform, tokens, **{**sizes, **of_draw})
    return tokens


def _highest(scores: Tensor, launch: Options) -> tuple[Tensor, Tensor]:
    """Return the highest score in each row of `scores` [n, size], float32 [n], and its index as `argmax` defines it."""
    num_rows, size = scores.shape
    num_parts = triton.cdiv(size, launch["ELEMENTS"])
    part_highest = torch.empty((num_rows, num_parts), dtype=torch.float32, device=scores.device)
    part_indices = torch.empty((num_rows, num_parts), dtype=torch.int32, device=scores.device)
    highest = torch.empty(num_rows, dtype=torch.float32, device=scores.device)
    indices = torch.empty(num_rows, dtype=torch.int64, device=scores.device)
    if num_rows:
        _part_highest_kernel[(num_rows, num_parts)](
            scores, part_highest, part_indices, scores.stride(0), scores.stride(1), SIZE=size, PARTS=num_parts, **launch
        )
        _highest_kernel[(num_rows,)](
            part_highest,
            part_indices,
            highest,
            indices,
            PARTS=num_parts,
            PART_TILE=triton.next_power_of_2(num_parts),
            SIZE=size,
        )
    return highest, indices


@triton.jit
def _part_highest_kernel(
    scores,
    part_highest,  # float32 [rows, PARTS], NaN for a part that has one
    part_indices,  # int32 [rows, PARTS]
    row_stride,
    stride,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Find the highest of ELEMENTS scores of one row, and the first index that has it."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    index = part * ELEMENTS + tl.arange(0, ELEMENTS)
    score = tl.load(scores + row * row_stride + index * stride, mask=index < SIZE, other=float("-inf")).to(tl.float32)
    is_nan = score != score
    highest = tl.max(tl.where(is_nan, float("-inf"), score), 0)
    first = tl.min(tl.where((score == highest) & (index < SIZE), index, SIZE), 0)
    has_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    tl.store(part_highest + row * PARTS + part, tl.where(has_nan, float("nan"), highest))
    tl.store(part_indices + row * PARTS + part, first)


@triton.jit
def _highest_kernel(
    part_highest,
    part_indices,
    highest_out,
    indices_out,
    PARTS: tl.constexpr,
    PART_TILE: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Combine the parts of one row."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PART_TILE)
    value = tl.load(part_highest + row * PARTS + part, mask=part < PARTS, other=float("-inf"))
    index = tl.load(part_indices + row * PARTS + part, mask=part < PARTS, other=SIZE)
    is_nan = value != value
    highest = tl.max(tl.where(is_nan, float("-inf"), value), 0)
    first = tl.min(tl.where(value == highest, index, SIZE), 0)
    has_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    is_finite = (tl.abs(highest) < float("inf")) & (has_nan == 0)
    tl.store(highest_out + row, highest)
    tl.store(indices_out + row, tl.where(is_finite, first, _NO_PLACE).to(tl.int64))


@triton.jit
def _is_filtered(top_k, top_p, SIZE: tl.constexpr):
    return ((top_k > 0) & (top_k < SIZE)) | (top_p < 1.0)


@triton.jit
def _depth_kernel(
    logits,
    highest,
    temperature,
    lowest_scaled,  # float32 [rows], below which a token is barred
    top_k,
    top_p,
    depths,  # int32 [rows, WIDTH + LIST]
    counts,  # int32 [rows, PARTS, _BINS], the tokens of each part by depth
    sums,  # float32 [rows, PARTS], the sum of weights of each part
    row_stride,
    stride,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    LIST: tl.constexpr,
    PARTS: tl.constexpr,
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
        destination = depths + row * (WIDTH + LIST) + token
        tl.store(destination, depth.to(tl.int32, bitcast=True), mask=token < WIDTH)
        if _is_filtered(tl.load(top_k + row), tl.load(top_p + row), SIZE):
            at = row * PARTS + tl.program_id(1)
            bins = tl.minimum(depth, _BINS - 1.0).to(tl.int32)
            tl.store(counts + at * _BINS + tl.arange(0, _BINS), tl.histogram(bins, _BINS))
            tl.store(sums + at, tl.sum(tl.exp(-depth), 0))


@triton.jit
def _bounds(counts, sums, top_k, top_p, SIZE: tl.constexpr, PARTS: tl.constexpr, PART_TILE: tl.constexpr):
    """Bound the depth down to which the first filter of one row keeps tokens.

    Returns a depth that is too small, as bits or -1, the first bin that is certainly enough, the number of tokens down
    to this bin (more than any list takes if it is the last bin), and the sum of weights of the whole row.
    """
    part, bin = tl.arange(0, PART_TILE), tl.arange(0, _BINS)
    at = part[:, None] * _BINS + bin[None, :]
    count = tl.sum(tl.load(counts + at, mask=(part < PARTS)[:, None], other=0), 0)
    total = tl.sum(tl.load(sums + part, mask=part < PARTS, other=0.0), 0)
    num_tokens = tl.cumsum(count, 0)
    # A token of a bin weighs at most as much as at the bin's least depth.
    most = count.to(tl.float32) * tl.exp(-bin.to(tl.float32))
    most_above = tl.cumsum(most, 0)
    most_below = tl.sum(most, 0) - most_above
    if (top_k > 0) & (top_k < SIZE):
        too_few, enough = num_tokens < top_k, num_tokens >= top_k
    else:
        too_few = most_above < top_p * total * (1.0 - _SURE)
        enough = most_below < (1.0 - top_p) * total * (1.0 - _SURE)
    first = tl.min(tl.where(enough | (bin == _BINS - 1), bin, _BINS), 0)
    too_small = _least_bits(tl.sum((too_few & (bin < first)).to(tl.int32), 0)) - 1
    num_kept = tl.sum(tl.where(bin == first, num_tokens, 0), 0)
    return too_small, first, tl.where(first == _BINS - 1, 0x7FFFFFF0, num_kept), total


@triton.jit
def _least_bits(bin):
    """Return the bits of the least depth in a bin; of infinity after the last bin."""
    return tl.where(bin < _BINS, bin.to(tl.float32).to(tl.int32, bitcast=True), _INFINITY)


@triton.jit
def _list_kernel(
    temperature,
    top_k,
    top_p,
    counts,
    sums,
    depths,
    listed,  # int32 [rows, LIST], the tokens of the list; their depths follow the depths of the row
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    LIST: tl.constexpr,
    PARTS: tl.constexpr,
    PART_TILE: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """List the tokens, among ELEMENTS of one row, that its first filter may keep, unless the row has too many."""
    row = tl.program_id(0).to(tl.int64)
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    if (tl.load(temperature + row) == 0.0) | (_is_filtered(k, p, SIZE) == 0):
        return
    counts += row * PARTS * _BINS
    _, last_bin, size, _ = _bounds(counts, sums + row * PARTS, k, p, SIZE, PARTS, PART_TILE)
    if size > LIST:
        return
    part, bin = tl.arange(0, PART_TILE), tl.arange(0, _BINS)
    before = (part < tl.program_id(1))[:, None] & (bin <= last_bin)[None, :]
    first = tl.sum(tl.sum(tl.load(counts + part[:, None] * _BINS + bin[None, :], mask=before, other=0), 1), 0)
    token = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    depths += row * (WIDTH + LIST)
    depth = tl.load(depths + token, mask=token < WIDTH, other=_INFINITY)
    is_listed = (depth < _least_bits(last_bin + 1)) & (token < SIZE)
    list_index = first + tl.cumsum(is_listed.to(tl.int32), 0) - 1
    tl.store(depths + WIDTH + list_index, depth, mask=is_listed)
    tl.store(listed + row * LIST + list_index, token, mask=is_listed)
    if tl.program_id(1) == 0:
        unused = size + tl.arange(0, 16)
        tl.store(depths + WIDTH + unused, tl.zeros([16], tl.int32) + _INFINITY, mask=unused < LIST)


@triton.jit
def _weight(depth):
    """Return exp(-depth) from the bits of a depth."""
    return tl.exp(-depth.to(tl.float32, bitcast=True))


@triton.jit
def _narrowed(depths, size, goal, low, high, ELEMENTS: tl.constexpr, COUNTS: tl.constexpr):
    """Return the least depth up to which the number of tokens (if COUNTS) or the sum of weights reaches `goal`.

    It is above `low` and at most `high`, at which the goal is reached.
    """
    number = tl.arange(0, _PIVOTS)
    while high - low > 1:
        step = tl.maximum((high - low) // _PIVOTS, 1)
        pivots = tl.minimum(low + step * (number + 1), high)
        pivots = tl.where(number == _PIVOTS - 1, high, pivots)
        reached = tl.zeros([ELEMENTS, _PIVOTS], tl.float32)
        for start in tl.range(0, size, ELEMENTS):
            token = start + tl.arange(0, ELEMENTS)
            depth = tl.load(depths + token, mask=token < size, other=_INFINITY)
            weight = tl.where(token < size, 1.0, 0.0) if COUNTS else _weight(depth)
            reached += tl.where(depth[:, None] <= pivots[None, :], weight[:, None], 0.0)
        enough = (tl.sum(reached, 0) >= goal) | (number == _PIVOTS - 1)
        low = tl.maximum(low, tl.max(tl.where(enough, low, pivots), 0))
        high = tl.min(tl.where(enough, pivots, high), 0)
    return high


@triton.jit
def _kept_weight(depths, size, token, deepest, last_tie):
    """Return exp(-depth) of each `token`; 0 for tokens deeper than `deepest`, and at `deepest` after `last_tie`."""
    depth = tl.load(depths + token, mask=token < size, other=_INFINITY)
    kept = (depth < deepest) | ((depth == deepest) & (token <= last_tie))
    return tl.where(kept, _weight(depth), 0.0)


@triton.jit
def _sample_kernel(
    temperature,
    top_k,
    top_p,
    counts,
    sums,
    depths,
    listed,
    uniform,
    tokens,  # int64 [rows], which holds the highest of each row
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    LIST: tl.constexpr,
    PARTS: tl.constexpr,
    PART_TILE: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Draw for one row, unless its temperature is 0 or no token can be drawn."""
    row = tl.program_id(0).to(tl.int64)
    if (tl.load(temperature + row) == 0.0) | (tl.load(tokens + row) == _NO_PLACE):
        return
    # Deeper tokens are barred, and tokens of the same depth after the last tie. In a list, the index of a token
    # stands for the token.
    too_small = tl.full([], -1, tl.int32)
    deepest = tl.full([], _INFINITY, tl.int32)
    num_listed = tl.full([], LIST + 1, tl.int32)
    total = tl.full([], 0.0, tl.float32)
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    if _is_filtered(k, p, SIZE):
        at = row * PARTS
        too_small, last_bin, num_listed, total = _bounds(counts + at * _BINS, sums + at, k, p, SIZE, PARTS, PART_TILE)
        deepest = tl.minimum(_least_bits(last_bin + 1), _INFINITY)
    is_listed = num_listed <= LIST
    size = tl.where(is_listed, (num_listed + 15) // 16, WIDTH // 16) * 16
    depths += row * (WIDTH + LIST) + tl.where(is_listed, WIDTH // 16, 0) * 16
    last_tie = size
    if (k > 0) & (k < SIZE):
        deepest = _narrowed(depths, size, k.to(tl.float32), too_small, deepest, ELEMENTS, COUNTS=True)
        too_small = tl.full([], -1, tl.int32)
        total = tl.full([], 0.0, tl.float32)
        for start in tl.range(0, size, ELEMENTS):
            total += tl.sum(_kept_weight(depths, size, start + tl.arange(0, ELEMENTS), deepest, last_tie), 0)
    if p < 1.0:
        goal = p * total
        deepest = _narrowed(depths, size, goal, too_small, deepest, ELEMENTS, COUNTS=False)
        above = tl.full([], 0.0, tl.float32)
        num_ties = tl.full([], 0, tl.int32)
        for start in tl.range(0, size, ELEMENTS):
            token = start + tl.arange(0, ELEMENTS)
            above += tl.sum(_kept_weight(depths, size, token, deepest, -1), 0)
            depth = tl.load(depths + token, mask=token < size, other=-1)
            num_ties += tl.sum((depth == deepest).to(tl.int32), 0)
        num_kept_ties = tl.maximum(tl.ceil((goal - above) / _weight(deepest)), 1.0)
        if num_kept_ties < num_ties:
            seen = tl.full([], 0, tl.int32)
            for start in tl.range(0, size, ELEMENTS):
                token = start + tl.arange(0, ELEMENTS)
                depth = tl.load(depths + token, mask=token < size, other=-1)
                tie = (depth == deepest).to(tl.int32)
                is_last = (tie > 0) & (seen + tl.cumsum(tie, 0) == num_kept_ties.to(tl.int32))
                last_tie = tl.minimum(last_tie, tl.min(tl.where(is_last, token, size), 0))
                seen += tl.sum(tie, 0)

    total = tl.full([], 0.0, tl.float64)
    for start in tl.range(0, size, ELEMENTS):
        weight = _kept_weight(depths, size, start + tl.arange(0, ELEMENTS), deepest, last_tie)
        total += tl.sum(weight.to(tl.float64), 0)
    target = tl.load(uniform + row) * total
    start = tl.full([], 0, tl.int32)
    before = tl.full([], 0.0, tl.float64)
    token = tl.arange(0, ELEMENTS)
    weight = _kept_weight(depths, size, token, deepest, last_tie).to(tl.float64)
    stretch = tl.sum(weight, 0)
    while (before + stretch <= target) & (start + ELEMENTS < size):
        before += stretch
        start += ELEMENTS
        token = start + tl.arange(0, ELEMENTS)
        weight = _kept_weight(depths, size, token, deepest, last_tie).to(tl.float64)
        stretch = tl.sum(weight, 0)
    passes = before + tl.cumsum(weight, 0) > target
    index = tl.min(tl.where(passes, token, size), 0)
    # Sums of the stretch in different orders may differ in the last bit.
    last = tl.max(tl.where(weight > 0.0, token, -1), 0)
    index = tl.minimum(index, last)
    if is_listed:
        index = tl.load(listed + row * LIST + index)
    tl.store(tokens + row, index.to(tl.int64))
