"""Elementwise activations."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_mp.kernels.triton.launch import options
from vllm_mp.kernels.triton.rows import rows_of

_SQRT_HALF = tl.constexpr(0.5**0.5)
_TWICE_SQRT_2_OVER_PI = tl.constexpr(2.0 * 0.7978845608028654)


def silu_and_mul(x: Tensor) -> Tensor:
    """See `ops.silu_and_mul`."""
    return _launch(x, x.shape[-1] // 2, "silu_and_mul")


def gelu(x: Tensor) -> Tensor:
    """See `ops.gelu`."""
    return _launch(x, x.shape[-1], "gelu")


def gelu_tanh(x: Tensor) -> Tensor:
    """See `ops.gelu_tanh`."""
    return _launch(x, x.shape[-1], "gelu_tanh")


def _launch(x: Tensor, dim: int, function: str) -> Tensor:
    """Apply `function` to every row of `x`; returns [..., dim]."""
    rows = rows_of(x)
    out = torch.empty((*x.shape[:-1], dim), dtype=x.dtype, device=x.device)
    if rows.num_rows and dim:
        launch = options("elementwise", x.device)
        _activation_kernel[(rows.num_rows, triton.cdiv(dim, launch["ELEMENTS"]))](
            rows.tensor,
            out,
            rows.outer_stride,
            rows.inner_stride,
            DIM=dim,
            INNER=rows.inner,
            FUNCTION=function,
            **launch,
        )
    return out


@triton.jit
def _activation_kernel(
    x,
    out,
    outer_stride,
    inner_stride,
    DIM: tl.constexpr,
    INNER: tl.constexpr,
    FUNCTION: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Compute ELEMENTS elements of one row of `out`, contiguous [rows, DIM]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = column < DIM
    start = x + row // INNER * outer_stride + row % INNER * inner_stride
    dtype = out.dtype.element_ty
    value = tl.load(start + column, mask=mask, other=0.0).to(tl.float32)
    if FUNCTION == "silu_and_mul":
        other = tl.load(start + DIM + column, mask=mask, other=0.0).to(tl.float32)
        result = (value * tl.sigmoid(value)).to(dtype).to(tl.float32) * other
    elif FUNCTION == "gelu":
        result = 0.5 * value * (1.0 + tl.erf(value * _SQRT_HALF))
    else:
        # (1 + tanh(y)) / 2 is the logistic function of 2y.
        result = value * tl.sigmoid((value + 0.044715 * value * value * value) * _TWICE_SQRT_2_OVER_PI)
    tl.store(out + row * DIM + column, result.to(dtype), mask=mask)
