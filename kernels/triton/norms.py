"""Normalisations over the last dimension, whole rows at a time."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_mp.kernels.reference import FLOAT8, FLOAT8_GROUP, QuantizedRows
from vllm_mp.kernels.triton.dependent_launch import prefetched_bytes, start_dependents
from vllm_mp.kernels.triton.float8 import store_quantized
from vllm_mp.kernels.triton.launch import norm_options
from vllm_mp.kernels.triton.rows import Rows, rows_of

_MAX_DIM = 65_536
"""The longest row that one program holds in registers."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `ops.rms_norm`."""
    rows = rows_of(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows.num_rows:
        grid, options = _launch(rows)
        _rms_norm_kernel[grid](
            rows.tensor,
            rows.tensor,
            weight,
            out,
            out,
            out,
            eps,
            rows.num_rows,
            rows.outer_stride,
            rows.inner_stride,
            DIM=rows.dim,
            INNER=rows.inner,
            ADDS=False,
            GROUP=0,
            DEPENDENTS=prefetched_bytes(x.device) > 0,
            **options,
        )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `ops.add_rms_norm`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return out, _add_rms_norm(x, residual, weight, eps, out, None)


def add_rms_norm_rows(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, num_groups: int
) -> tuple[QuantizedRows, Tensor]:
    """See `ops.add_rms_norm_rows`."""
    out = torch.empty(x.shape, dtype=FLOAT8, device=x.device)
    scale = torch.empty((x.shape[0], num_groups), dtype=torch.float32, device=x.device)
    total = _add_rms_norm(x, residual, weight, eps, out, scale)
    return QuantizedRows(out, scale, x.dtype), total


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor, scale: Tensor | None) -> Tensor:
    """Fill `out` with the norm, quantized if there is a `scale` to fill too; return the sum."""
    rows = rows_of(x)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows.num_rows:
        grid, options = _launch(rows)
        group = 0 if scale is None else options["TILE"] if scale.shape[1] == 1 else FLOAT8_GROUP
        others = rows_of(residual)
        if others[1:] != rows[1:]:
            rows, others = rows_of(x.contiguous()), rows_of(residual.contiguous())
        _rms_norm_kernel[grid](
            rows.tensor,
            others.tensor,
            weight,
            out,
            total,
            total if scale is None else scale,
            eps,
            rows.num_rows,
            rows.outer_stride,
            rows.inner_stride,
            DIM=rows.dim,
            INNER=rows.inner,
            ADDS=True,
            GROUP=group,
            DEPENDENTS=prefetched_bytes(x.device) > 0,
            **options,
        )
    return total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See `ops.layer_norm`."""
    rows = rows_of(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows.num_rows:
        grid, options = _launch(rows)
        _layer_norm_kernel[grid](
            rows.tensor,
            weight,
            bias,
            out,
            eps,
            rows.num_rows,
            rows.outer_stride,
            rows.inner_stride,
            DIM=rows.dim,
            INNER=rows.inner,
            **options,
        )
    return out


def _launch(rows: Rows) -> tuple[tuple[int], dict[str, int]]:
    """Return the grid and the options of a launch, ROWS and TILE included; raise ValueError if a row is too long."""
    if rows.dim > _MAX_DIM:
        raise ValueError(f"a row of {rows.dim} elements is too long for a norm in Triton; the limit is {_MAX_DIM}")
    options = dict(norm_options(rows.dim, rows.tensor.device))
    tile = triton.next_power_of_2(rows.dim)
    # Short rows (query and key norms) share a program.
    rows_per_program = max(1, options.pop("ELEMENTS") // tile)
    return (triton.cdiv(rows.num_rows, rows_per_program),), {**options, "ROWS": rows_per_program, "TILE": tile}


@triton.jit(do_not_specialize=["count"])
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    scale,  # float32 [count, ceil(DIM / GROUP)] if GROUP
    eps,
    count,
    outer_stride,
    inner_stride,
    DIM: tl.constexpr,
    INNER: tl.constexpr,
    ADDS: tl.constexpr,
    GROUP: tl.constexpr,
    DEPENDENTS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Normalise ROWS of the `count` rows of `x`, or of `x + residual` if ADDS; `out` and `total` are contiguous.

    If GROUP is not 0, the norm is quantized with a scale for each GROUP elements.
    """
    start_dependents(DEPENDENTS)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, TILE)
    mask = (row < count)[:, None] & (column < DIM)[None, :]
    start = row // INNER * outer_stride + row % INNER * inner_stride
    dtype = x.dtype.element_ty
    value = tl.load(x + start[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if ADDS:
        added = tl.load(residual + start[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        rounded = (value + added).to(dtype)
        tl.store(total + row[:, None] * DIM + column[None, :], rounded, mask=mask)
        value = rounded.to(tl.float32)
    mean_square = tl.sum(value * value, 1) / DIM
    normed = value * tl.rsqrt(mean_square + eps)[:, None]
    if weight.dtype.element_ty == dtype:
        # Rounded before the weight multiplies it, as in kernels/reference.py.
        normed = normed.to(dtype).to(tl.float32)
    scaled = normed * tl.load(weight + column, mask=column < DIM, other=0.0).to(tl.float32)[None, :]
    if GROUP:
        store_quantized(scaled.to(dtype).to(tl.float32), out, scale, row, column, mask, DIM, GROUP)
    else:
        tl.store(out + row[:, None] * DIM + column[None, :], scaled.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["count"])
def _layer_norm_kernel(
    x,
    weight,
    bias,
    out,
    eps,
    count,
    outer_stride,
    inner_stride,
    DIM: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Normalise ROWS of the `count` rows of `x`; `out` is contiguous."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, TILE)
    in_row = column < DIM
    mask = (row < count)[:, None] & in_row[None, :]
    start = row // INNER * outer_stride + row % INNER * inner_stride
    value = tl.load(x + start[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(value, 1) / DIM
    centred = tl.where(mask, value - mean[:, None], 0.0)
    variance = tl.sum(centred * centred, 1) / DIM
    scale = tl.load(weight + column, mask=in_row, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=in_row, other=0.0).to(tl.float32)
    normed = centred * tl.rsqrt(variance + eps)[:, None] * scale[None, :] + shift[None, :]
    tl.store(out + row[:, None] * DIM + column[None, :], normed.to(out.dtype.element_ty), mask=mask)
