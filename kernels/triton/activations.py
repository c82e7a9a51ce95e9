"""Elementwise activations."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_mp.kernels.reference import FLOAT8, FLOAT8_GROUP, QuantizedRows
from vllm_mp.kernels.triton.dependent_launch import prefetched_bytes, start_dependents
from vllm_mp.kernels.triton.float8 import store_quantized
from vllm_mp.kernels.triton.launch import norm_options, options
from vllm_mp.kernels.triton.rows import rows_of

_SQRT_HALF = tl.constexpr(0.5**0.5)
_TWICE_SQRT_2_OVER_PI = tl.constexpr(2.0 * 0.7978845608028654)


def silu_and_mul(x: Tensor) -> Tensor:
    """See `ops.silu_and_mul`."""
    return _launch(x, x.shape[-1] // 2, "silu_and_mul")


def silu_and_mul_rows(x: Tensor, num_groups: int) -> QuantizedRows:
    """See `ops.silu_and_mul_rows`."""
    dim = x.shape[-1] // 2
    scale = torch.empty((x.shape[0], num_groups), dtype=torch.float32, device=x.device)
    return QuantizedRows(_launch(x, dim, "silu_and_mul", scale), scale, x.dtype)


def gelu(x: Tensor) -> Tensor:
    """See `ops.gelu`."""
    return _launch(x, x.shape[-1], "gelu")


def gelu_tanh(x: Tensor) -> Tensor:
    """See `ops.gelu_tanh`."""
    return _launch(x, x.shape[-1], "gelu_tanh")


def _launch(x: Tensor, dim: int, function: str, scale: Tensor | None = None) -> Tensor:
    """Apply `function` to every row of `x`; returns [..., dim], quantized if there is a `scale` to fill."""
    rows = rows_of(x)
    out = torch.empty((*x.shape[:-1], dim), dtype=x.dtype if scale is None else FLOAT8, device=x.device)
    if rows.num_rows and dim:
        launch, group = options("elementwise", x.device), 0
        if scale is not None and scale.shape[1] == 1:
            # The scale depends on the whole row.
            group = triton.next_power_of_2(dim)
            launch = {"ELEMENTS": group, "num_warps": norm_options(dim, x.device)["num_warps"]}
        elif scale is not None:
            group = FLOAT8_GROUP
            launch = {**launch, "ELEMENTS": max(launch["ELEMENTS"], group)}
        _activation_kernel[(rows.num_rows, triton.cdiv(dim, launch["ELEMENTS"]))](
            rows.tensor,
            out,
            out if scale is None else scale,
            rows.outer_stride,
            rows.inner_stride,
            DIM=dim,
            INNER=rows.inner,
            FUNCTION=function,
            GROUP=group,
            DEPENDENTS=prefetched_bytes(x.device) > 0,
            **launch,
        )
    return out


@triton.jit
def _activation_kernel(
    x,
    out,
    scale,  # float32 [rows, ceil(DIM / GROUP)] if GROUP
    outer_stride,
    inner_stride,
    DIM: tl.constexpr,
    INNER: tl.constexpr,
    FUNCTION: tl.constexpr,
    GROUP: tl.constexpr,
    DEPENDENTS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Compute ELEMENTS elements of one row of `out`, contiguous [rows, DIM]; quantized if GROUP is not 0."""
    start_dependents(DEPENDENTS)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = column < DIM
    start = x + row // INNER * outer_stride + row % INNER * inner_stride
    dtype = x.dtype.element_ty
    value = tl.load(start + column, mask=mask, other=0.0).to(tl.float32)
    if FUNCTION == "silu_and_mul":
        other = tl.load(start + DIM + column, mask=mask, other=0.0).to(tl.float32)
        result = (value * tl.sigmoid(value)).to(dtype).to(tl.float32) * other
    elif FUNCTION == "gelu":
        result = 0.5 * value * (1.0 + tl.erf(value * _SQRT_HALF))
    else:
        # (1 + tanh(y)) / 2 is the logistic function of 2y.
        result = value * tl.sigmoid((value + 0.044715 * value * value * value) * _TWICE_SQRT_2_OVER_PI)
    result = result.to(dtype)
    if GROUP:
        rows = row + tl.arange(0, 1)
        store_quantized(result.to(tl.float32)[None, :], out, scale, rows, column, mask[None, :], DIM, GROUP)
    else:
        tl.store(out + row * DIM + column, result, mask=mask)
