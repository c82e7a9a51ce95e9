"""Describes tensors as rows of contiguous elements at regular distances, as the elementwise kernels read them."""

from typing import NamedTuple

from torch import Tensor


class Rows(NamedTuple):
    """Rows of `dim` elements: row i begins `i // inner * outer_stride + i % inner * inner_stride` elements in."""

    tensor: Tensor
    num_rows: int
    dim: int
    inner: int
    outer_stride: int
    inner_stride: int


def rows_of(x: Tensor) -> Rows:
    """Return the rows along the last dimension of `x`, of a contiguous copy if their distances are irregular."""
    dim = x.shape[-1]
    if x.stride(-1) == 1:
        if x.dim() == 2:
            return Rows(x, x.shape[0], dim, 1, x.stride(0), 0)
        if x.dim() == 3:
            return Rows(x, x.shape[0] * x.shape[1], dim, x.shape[1], x.stride(0), x.stride(1))
    x = x.contiguous()
    return Rows(x, x.numel() // dim if dim else 0, dim, 1, dim, 0)
