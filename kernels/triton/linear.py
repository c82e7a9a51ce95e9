"""Products of rows with weights: a kernel for few rows, and the choice between it and products of many rows.

A product of few rows waits for its weights, which the kernel reads once, in loads of 16 bytes. Each warp of a program
multiplies a slice of the inputs of a step, so that even a tile of 16 outputs keeps four warps busy; a slice in 8-bit
floats is also a group with a scale. If outputs are so few that the device would idle, the inputs are cut into parts
(split-K), and a second kernel adds their sums in order.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from vllm_mp.kernels.reference import QuantizedRows, rows_of_product
from vllm_mp.kernels.triton.dependent_launch import LINE_BYTES, prefetch_and_wait, prefetched_bytes
from vllm_mp.kernels.triton.float8 import add_parts, multiply, product, product_of_tiles, quantize_rows
from vllm_mp.kernels.triton.launch import MAX_FEW_ROWS, Options, linear_options, options

_LIBRARY_UNIT = 16
"""torch's product with 8-bit floats needs numbers of inputs and outputs that are multiples of this."""
_ALIGNED = 8
"""Rows of 16-bit weights of a multiple of this many inputs allow loads of 16 bytes."""


def linear(
    x: Tensor | QuantizedRows, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """See `ops.linear`; torch computes products of many rows, except those with 8-bit floats that it does not take."""
    outputs, inputs = weight.shape
    if scale is None:
        assert isinstance(x, Tensor), "quantized rows need a weight with scales"
        rows = x.numel() // inputs
        has_kernel = x.dtype == weight.dtype and weight.dtype.itemsize == 2 and weight.is_contiguous()
        if not has_kernel or inputs % _ALIGNED or not 0 < rows <= MAX_FEW_ROWS:
            return F.linear(x, weight, bias)
        launch = linear_options(outputs, inputs, "16", weight.device)
        if rows > launch["MAX_ROWS"]:
            return F.linear(x, weight, bias)
        out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
        flat = x.reshape(rows, inputs)
        _multiply_few(flat if flat.stride(1) == 1 else flat.contiguous(), None, weight, None, bias, out, launch)
        return out.view(*x.shape[:-1], outputs)
    (quantized, x_scale, dtype), shape = rows_of_product(x, scale.shape[1], quantize_rows)
    rows, device = len(quantized), weight.device
    launch = linear_options(outputs, inputs, "8" if scale.shape[1] == 1 else "blocks", device)
    is_few = rows <= min(launch["MAX_ROWS"], MAX_FEW_ROWS)
    by_library = not is_few and _library_multiplies(dtype, weight, scale)
    if by_library and (rows <= MAX_FEW_ROWS or rows > options("fp8_library", device)["ROWS"]):
        # Fast accumulation would keep about 14 bits of each sum over all inputs.
        out = torch._scaled_mm(quantized, weight.t(), x_scale, scale.t(), out_dtype=torch.bfloat16)
        if bias is not None:
            out += bias
    else:
        out = torch.empty((rows, outputs), dtype=dtype, device=device)
        if 0 < rows <= MAX_FEW_ROWS:
            _multiply_few(quantized, x_scale, weight, scale, bias, out, launch)
        elif rows:
            multiply(quantized, x_scale, weight, scale, bias, out)
    return out.view(*shape, outputs)


def _library_multiplies(dtype: torch.dtype, weight: Tensor, scale: Tensor) -> bool:
    """Tell whether `torch._scaled_mm` takes these: on CUDA, bfloat16, and with a scale for each output."""
    outputs, inputs = weight.shape
    return (
        weight.device.type == "cuda"
        and dtype == torch.bfloat16
        and scale.shape == (outputs, 1)
        and inputs % _LIBRARY_UNIT == outputs % _LIBRARY_UNIT == 0
        and _library_keeps_stream(weight.device)
    )


def _library_keeps_stream(device: torch.device) -> bool:
    """Tell whether torch multiplies rows on the current stream; before 2.12 it did not on compute capability 8.9."""
    return torch.__version__ >= "2.12" or torch.cuda.get_device_capability(device) != (8, 9)


def _multiply_few(
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    launch: Options,
) -> None:
    """Fill `out` [rows, outputs] for at most `MAX_FEW_ROWS` rows `x` of contiguous elements."""
    (rows, inputs), outputs = x.shape, len(weight)
    slices, slice_inputs, output_tile = launch["SLICES"], launch["SLICE_INPUTS"], launch["OUTPUT_TILE"]
    steps = triton.cdiv(inputs, slices * slice_inputs)
    parts = min(launch["PARTS"], steps)
    # No more than the rows hold, in whole lines.
    row_bytes = max(LINE_BYTES.value, triton.next_power_of_2(inputs * weight.itemsize))
    prefetch = min(prefetched_bytes(x.device), output_tile * row_bytes)
    sums = out
    if parts > 1:
        sums = torch.empty((parts, rows, outputs), dtype=torch.float32, device=x.device)
    _few_rows_kernel[(triton.cdiv(outputs, output_tile), parts)](
        x,
        out if x_scale is None else x_scale,
        weight,
        out if scale is None else scale,
        out if bias is None else bias,
        sums,
        rows,
        x.stride(0),
        triton.cdiv(steps, parts),
        INPUTS=inputs,
        OUTPUTS=outputs,
        SCALED=scale is not None,
        GROUPED=scale is not None and scale.shape[1] > 1,
        OUTPUTS_A_SCALE=1 if scale is None else outputs // len(scale),
        BIASED=bias is not None and parts == 1,
        ROWS=MAX_FEW_ROWS,
        OUTPUT_TILE=output_tile,
        SLICES=slices,
        SLICE_INPUTS=slice_inputs,
        PREFETCH=prefetch,
        launch_pdl=prefetch > 0,
        **{name: value for name, value in launch.items() if name in ("num_warps", "num_stages", "maxnreg")},
    )
    if parts > 1:
        add_parts(sums, bias, out)


@triton.jit(do_not_specialize=["num_rows", "steps_a_part"])
def _few_rows_kernel(
    x,  # [num_rows, INPUTS], rows row_stride apart
    x_scale,  # float32 [num_rows, groups] if SCALED
    weight,  # [OUTPUTS, INPUTS]
    scale,  # float32 [OUTPUTS / OUTPUTS_A_SCALE, groups] if SCALED
    bias,  # [OUTPUTS] if BIASED
    out,  # [num_rows, OUTPUTS], or float32 [parts, num_rows, OUTPUTS]
    num_rows,
    row_stride,
    steps_a_part,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SCALED: tl.constexpr,
    GROUPED: tl.constexpr,
    OUTPUTS_A_SCALE: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUT_TILE: tl.constexpr,
    SLICES: tl.constexpr,
    SLICE_INPUTS: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """Compute OUTPUT_TILE outputs of all rows, over one part of the inputs."""
    STEP: tl.constexpr = SLICES * SLICE_INPUTS
    STEPS: tl.constexpr = (INPUTS + STEP - 1) // STEP
    GROUPS: tl.constexpr = (INPUTS + SLICE_INPUTS - 1) // SLICE_INPUTS if GROUPED else 1
    first = tl.program_id(0) * OUTPUT_TILE
    part = tl.program_id(1)
    row, in_tile, of_step = tl.arange(0, ROWS), tl.arange(0, OUTPUT_TILE), tl.arange(0, SLICES)
    in_rows, in_outputs = row < num_rows, first + in_tile < OUTPUTS
    in_step = of_step[:, None] * SLICE_INPUTS + tl.arange(0, SLICE_INPUTS)[None, :]
    # Only the offset of the tile may exceed 32 bits.
    weights = weight + first.to(tl.int64) * INPUTS
    if PREFETCH:
        # The kernel before may still run: nothing else may be read or written before this.
        prefetch_and_wait(weights, OUTPUTS - first, part * steps_a_part * STEP, INPUTS, OUTPUT_TILE, PREFETCH)
    x_scales, scales = x_scale + row * GROUPS, scale + (first + in_tile) // OUTPUTS_A_SCALE * GROUPS
    total = tl.zeros([SLICES, ROWS, OUTPUT_TILE], tl.float32)
    if GROUPED:
        group = part * steps_a_part * SLICES + of_step[:, None]
        of_rows = _scales(x_scales, group, in_rows, GROUPS)
        of_outputs = _scales(scales, group, in_outputs, GROUPS)
    for step in tl.range(part * steps_a_part, tl.minimum((part + 1) * steps_a_part, STEPS)):
        column = step * STEP + in_step
        # Masks that hold for every element would cost instructions.
        x_mask, weight_mask = in_rows[None, :, None], None
        if OUTPUTS % OUTPUT_TILE:
            weight_mask = in_outputs[None, None, :]
        if INPUTS % STEP:
            x_mask = x_mask & (column < INPUTS)[:, None, :]
            weight_mask = (column < INPUTS)[:, :, None] & in_outputs[None, None, :]
        rows = tl.load(x + row[None, :, None] * row_stride + column[:, None, :], mask=x_mask, other=0.0)
        elements = weights + in_tile[None, None, :] * INPUTS + column[:, :, None]
        tile = tl.load(elements) if weight_mask is None else tl.load(elements, mask=weight_mask, other=0.0)
        if GROUPED:
            # The scales of the next step arrive during this one.
            group = (step + 1) * SLICES + of_step[:, None]
            next_of_rows = _scales(x_scales, group, in_rows, GROUPS)
            next_of_outputs = _scales(scales, group, in_outputs, GROUPS)
            of_tile = product_of_tiles(rows, tile)
            total += of_tile * of_rows[:, :, None] * of_outputs[:, None, :]
            of_rows, of_outputs = next_of_rows, next_of_outputs
        else:
            total = product(rows, tile, total)
    result = tl.sum(total, 0)
    if SCALED and not GROUPED:
        of_rows = tl.load(x_scales, mask=in_rows, other=0.0)
        of_outputs = tl.load(scales, mask=in_outputs, other=0.0)
        result = result * of_rows[:, None] * of_outputs[None, :]
    if BIASED:
        result += tl.load(bias + first + in_tile, mask=in_outputs, other=0.0).to(tl.float32)[None, :]
    destination = out + part.to(tl.int64) * num_rows * OUTPUTS + row[:, None] * OUTPUTS + (first + in_tile)[None, :]
    tl.store(destination, result.to(out.dtype.element_ty), mask=in_rows[:, None] & in_outputs[None, :])


@triton.jit
def _scales(scales, group, exists, GROUPS: tl.constexpr):
    """Return the scales [SLICES, N] of groups `group` [SLICES, 1], of the rows that `scales` [N] points to.

    Those of rows that do not exist, and of groups beyond GROUPS, are zero.
    """
    return tl.load(scales[None, :] + group, mask=(group < GROUPS) & exists[None, :], other=0.0)
