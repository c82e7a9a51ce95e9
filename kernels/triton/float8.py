"""Products of many rows with weights in 8-bit floats, and conversions to and from that type."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_mp.kernels.reference import (
    FLOAT8,
    FLOAT8_GROUP,
    FLOAT8_MAX,
    LEAST_HIGHEST,
)
from vllm_mp.kernels.triton.dependent_launch import prefetched_bytes, start_dependents
from vllm_mp.kernels.triton.interpreter import interpreted
from vllm_mp.kernels.triton.launch import norm_options, num_parts, options

_INTERPRETED = tl.constexpr(interpreted())
"""Triton's interpreter neither rounds to 8-bit floats nor knows their NaN, so the kernels do both themselves."""
_MAX = tl.constexpr(FLOAT8_MAX)
_LEAST_HIGHEST = tl.constexpr(LEAST_HIGHEST)
_TO_FLOAT16 = """{{
    .reg .b32 bytes;
    .reg .b16 pair, rest;
    prmt.b32 bytes, $1, 0, {};
    mov.b32 {{pair, rest}}, bytes;
    cvt.rn.f16x2.e4m3x2 $0, pair;
}}"""
_LOW_BYTES, _HIGH_BYTES = tl.constexpr(_TO_FLOAT16.format("0x4420")), tl.constexpr(_TO_FLOAT16.format("0x4431"))
"""PTX that converts the low, or the high, bytes of two 16-bit integers from 8-bit floats to float16."""
_HELD_INPUTS = tl.constexpr(128)
"""The inputs of which tensor cores hold a sum; a tile of a product has as many or more."""
_ROW_TILES = (64, 128)


def quantize_rows(x: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """See `ops.quantize_rows`."""
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, inputs = x.shape
    quantized = torch.empty((rows, inputs), dtype=FLOAT8, device=x.device)
    scale = torch.empty((rows, num_groups), dtype=torch.float32, device=x.device)
    if rows:
        _quantize_kernel[(rows,)](
            x,
            quantized,
            scale,
            x.stride(0),
            INPUTS=inputs,
            GROUP=FLOAT8_GROUP,
            GROUP_TILE=triton.next_power_of_2(triton.cdiv(inputs, FLOAT8_GROUP)),
            GROUPED=num_groups > 1,
            DEPENDENTS=prefetched_bytes(x.device) > 0,
            num_warps=norm_options(inputs, x.device)["num_warps"],
        )
    return quantized, scale


def multiply(x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Fill `out` [rows, outputs] with `ops.linear` of the quantized rows `x`.

    If the tiles of the outputs are too few programs for the device, the inputs are cut into parts too, and a second
    kernel adds their sums.
    """
    (rows, inputs), outputs = x.shape, len(weight)
    size = next((size for size in _ROW_TILES if rows <= size), _ROW_TILES[-1])
    launch = options(f"fp8/{size}", x.device)
    row_tiles, output_tiles = triton.cdiv(rows, launch["ROWS"]), triton.cdiv(outputs, launch["OUTPUT_TILE"])
    input_tiles = triton.cdiv(inputs, FLOAT8_GROUP)
    parts = num_parts(row_tiles * output_tiles, input_tiles, x.device)
    sums = out
    if parts > 1:
        sums = torch.empty((parts, rows, outputs), dtype=torch.float32, device=x.device)
    _product_kernel[(row_tiles * output_tiles, parts)](
        x,
        x_scale,
        weight,
        scale,
        out if bias is None else bias,
        sums,
        rows,
        row_tiles,
        triton.cdiv(input_tiles, parts),
        INPUTS=inputs,
        OUTPUTS=outputs,
        GROUP=FLOAT8_GROUP,
        GROUPED=scale.shape[1] > 1,
        OUTPUTS_A_SCALE=outputs // len(scale),
        BIASED=bias is not None and parts == 1,
        **launch,
    )
    if parts > 1:
        add_parts(sums, bias, out)


def add_parts(sums: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Fill `out` [rows, outputs] with the sum of all parts of `sums`, float32 [parts, rows, outputs], and `bias`."""
    parts, rows, outputs = sums.shape
    elementwise = options("elementwise", out.device)
    _add_kernel[(rows, triton.cdiv(outputs, elementwise["ELEMENTS"]))](
        sums,
        out if bias is None else bias,
        out,
        parts,
        rows,
        OUTPUTS=outputs,
        BIASED=bias is not None,
        **elementwise,
    )


@triton.jit
def to_float8(x):
    """See `reference.to_float8`."""
    x = x.to(tl.float32)
    # Comparisons with a NaN are false, so a NaN stays.
    x = tl.where(x > _MAX, _MAX, tl.where(x < -_MAX, -_MAX, x))
    if _INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        # Below 2**-6 the steps are 2**-9; above, a number keeps its exponent and three bits.
        is_small = tl.abs(x) < 2.0**-6
        steps = (tl.where(is_small, tl.abs(x), 0.0) * 512.0 + 12582912.0) - 12582912.0
        rounded = (bits & 0x7FFFFFFF) + 0x7FFFF + ((bits >> 20) & 1)
        byte = tl.where(is_small, steps.to(tl.int32), (rounded >> 20) - (120 << 3))
        byte = tl.where(x != x, 0x7F, byte) | ((bits >> 24) & 0x80)
        return byte.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        return x.to(tl.float8e4nv)


@triton.jit
def from_float8(x, DTYPE: tl.constexpr):
    """Return `x`, of any type, in DTYPE."""
    if _INTERPRETED and x.dtype == tl.float8e4nv:
        byte = x.to(tl.uint8, bitcast=True)
        return tl.where((byte & 0x7F) == 0x7F, float("nan"), x.to(tl.float32)).to(DTYPE)
    elif x.dtype == tl.float8e4nv:
        # Triton 3.6 converts directly to bfloat16 by an instruction that compute capability 8.9 lacks.
        return x.to(tl.float16).to(DTYPE)
    else:
        return x.to(DTYPE)


@triton.jit
def from_float8_pairs(pairs, DTYPE: tl.constexpr):
    """Return the 8-bit floats in the low bytes of `pairs`, 16-bit integers, and in the high bytes, both in DTYPE."""
    if _INTERPRETED:
        low, high = (pairs & 0xFF).to(tl.uint8), ((pairs >> 8) & 0xFF).to(tl.uint8)
        return (
            from_float8(low.to(tl.float8e4nv, bitcast=True), DTYPE),
            from_float8(high.to(tl.float8e4nv, bitcast=True), DTYPE),
        )
    else:
        # Two pairs lie in a register: one instruction selects the bytes, and one converts both.
        return _selected(pairs, _LOW_BYTES).to(DTYPE), _selected(pairs, _HIGH_BYTES).to(DTYPE)


@triton.jit
def _selected(pairs, ASM: tl.constexpr):
    return tl.inline_asm_elementwise(ASM, "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def stored(x, pointer):
    """Return `x` converted for a store at `pointer`, which may point to 8-bit floats."""
    if pointer.dtype.element_ty == tl.float8e4nv:
        return to_float8(x)
    else:
        return x


@triton.jit
def store_quantized(values, quantized, scale, row, column, mask, DIM: tl.constexpr, GROUP: tl.constexpr):
    """Quantize `values` float32 [ROWS, TILE], zero where not in `mask`, and store them with their scales.

    Quotients are rounded exactly. Values in 16 bits have few digits, so many quotients lie on the midpoint of two 8-bit
    floats, and an error in the last bit would change them by a step.

    `row` [ROWS] and `column` [TILE], whole groups of GROUP columns, are their indices in `quantized` [rows, DIM];
    `scale` is [rows, ceil(DIM / GROUP)].
    """
    groups: tl.constexpr = (DIM + GROUP - 1) // GROUP
    grouped = tl.reshape(values, [values.shape[0], values.shape[1] // GROUP, GROUP])
    of_group = tl.div_rn(tl.maximum(tl.max(tl.abs(grouped), 2), _LEAST_HIGHEST), _MAX)
    group = tl.min(tl.reshape(column, [values.shape[1] // GROUP, GROUP]), 1) // GROUP
    in_row = tl.max(tl.reshape(mask.to(tl.int32), grouped.shape), 2) > 0
    tl.store(scale + row[:, None] * groups + group[None, :], of_group, mask=in_row)
    bytes = to_float8(tl.reshape(tl.div_rn(grouped, of_group[:, :, None]), values.shape))
    tl.store(quantized + row[:, None] * DIM + column[None, :], bytes, mask=mask)


@triton.jit
def _quantize_kernel(
    x,
    quantized,  # [rows, INPUTS]
    scale,  # float32 [rows], or [rows, ceil(INPUTS / GROUP)] if GROUPED
    row_stride,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    GROUPED: tl.constexpr,
    DEPENDENTS: tl.constexpr,
):
    """Quantize one row."""
    start_dependents(DEPENDENTS)
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUP_TILE)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = column < INPUTS
    value = tl.load(x + row * row_stride + column, mask=mask, other=0.0).to(tl.float32)
    highest = tl.max(tl.abs(value), 1)
    if GROUPED:
        groups: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
        of_group = tl.div_rn(tl.maximum(highest, _LEAST_HIGHEST), _MAX)
        tl.store(scale + row * groups + group, of_group, mask=group < groups)
        value = tl.div_rn(value, of_group[:, None])
    else:
        of_row = tl.div_rn(tl.maximum(tl.max(highest, 0), _LEAST_HIGHEST), _MAX)
        tl.store(scale + row, of_row)
        value = tl.div_rn(value, of_row)
    tl.store(quantized + row * INPUTS + column, to_float8(value), mask=mask)


@triton.jit
def product(rows, weights, total):
    """Return `total` plus the product of two tiles of 16-bit or 8-bit floats.

    The tensor cores of compute capabilities 8.9 and 9.0 keep about 14 bits of a sum of 8-bit products. So each product
    of tiles, which has at most 256 inputs, starts at zero and is added to `total` in float32.
    """
    if _INTERPRETED or rows.dtype == tl.float8e4nv:
        return total + product_of_tiles(rows, weights)
    else:
        return tl.dot(rows, weights, total)


@triton.jit
def product_of_tiles(rows, weights):
    """Return the product of two tiles of 16-bit or 8-bit floats in float32."""
    if _INTERPRETED:
        return tl.dot(from_float8(rows, tl.float32), from_float8(weights, tl.float32), input_precision="ieee")
    elif rows.dtype == tl.float8e4nv:
        # Without a limit, Triton on compute capability 8.9 adds the product to a total in the tensor cores after all.
        return tl.dot(rows, weights, max_num_imprecise_acc=_HELD_INPUTS)
    else:
        return tl.dot(rows, weights)


@triton.jit(do_not_specialize=["num_rows", "row_tiles", "tiles_a_part"])
def _product_kernel(
    x,  # [num_rows, INPUTS]
    x_scale,  # float32 [num_rows, groups]
    weight,  # [OUTPUTS, INPUTS]
    scale,  # float32 [OUTPUTS / OUTPUTS_A_SCALE, groups]
    bias,  # [OUTPUTS] if BIASED
    out,  # [num_rows, OUTPUTS], or float32 [parts, num_rows, OUTPUTS]
    num_rows,
    row_tiles,
    tiles_a_part,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPED: tl.constexpr,
    OUTPUTS_A_SCALE: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUT_TILE: tl.constexpr,
):
    """Compute a tile ROWS x OUTPUT_TILE of the result, over one part of the inputs."""
    # Neighbouring programs share weights, which are larger than the rows.
    row = (tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    output = (tl.program_id(0) // row_tiles * OUTPUT_TILE + tl.arange(0, OUTPUT_TILE)).to(tl.int64)
    in_rows, in_outputs = row < num_rows, output < OUTPUTS
    part = tl.program_id(1)
    tiles: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
    groups: tl.constexpr = tiles if GROUPED else 1
    x_scales = x_scale + row * groups
    scales = scale + output // OUTPUTS_A_SCALE * groups
    total = tl.zeros([ROWS, OUTPUT_TILE], tl.float32)
    for tile in tl.range(part * tiles_a_part, tl.minimum((part + 1) * tiles_a_part, tiles)):
        column = tile * GROUP + tl.arange(0, GROUP)
        x_mask, weight_mask = in_rows[:, None], in_outputs[None, :]
        if INPUTS % GROUP:
            x_mask, weight_mask = x_mask & (column < INPUTS)[None, :], weight_mask & (column < INPUTS)[:, None]
        rows = tl.load(x + row[:, None] * INPUTS + column[None, :], mask=x_mask, other=0.0)
        weights = tl.load(weight + output[None, :] * INPUTS + column[:, None], mask=weight_mask, other=0.0)
        if GROUPED:
            of_rows = tl.load(x_scales + tile, mask=in_rows, other=0.0)
            of_outputs = tl.load(scales + tile, mask=in_outputs, other=0.0)
            of_tile = product_of_tiles(rows, weights)
            total += of_tile * of_rows[:, None] * of_outputs[None, :]
        else:
            total = product(rows, weights, total)
    if not GROUPED:
        of_rows = tl.load(x_scales, mask=in_rows, other=0.0)
        of_outputs = tl.load(scales, mask=in_outputs, other=0.0)
        total = total * of_rows[:, None] * of_outputs[None, :]
    if BIASED:
        total += tl.load(bias + output, mask=in_outputs, other=0.0).to(tl.float32)[None, :]
    destination = out + part.to(tl.int64) * num_rows * OUTPUTS + row[:, None] * OUTPUTS + output[None, :]
    tl.store(destination, total.to(out.dtype.element_ty), mask=in_rows[:, None] & in_outputs[None, :])


@triton.jit(do_not_specialize=["num_parts", "num_rows"])
def _add_kernel(
    sums,  # float32 [num_parts, num_rows, OUTPUTS]
    bias,  # [OUTPUTS] if BIASED
    out,  # [num_rows, OUTPUTS]
    num_parts,
    num_rows,
    OUTPUTS: tl.constexpr,
    BIASED: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Add all parts, in order, for ELEMENTS elements of one row."""
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = output < OUTPUTS
    total = tl.zeros([ELEMENTS], tl.float32)
    source = sums + row * OUTPUTS + output
    for _ in range(num_parts):
        total += tl.load(source, mask=mask, other=0.0)
        source += num_rows * OUTPUTS
    if BIASED:
        total += tl.load(bias + output, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * OUTPUTS + output, total.to(out.dtype.element_ty), mask=mask)
