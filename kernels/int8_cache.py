"""A KV cache in 8 bits, with a scale for each token and head (int8_per_token_head in vLLM).

A cell has the integers of each head, and behind them the scale, a float32 in 4 bytes. So a copy of a block's bytes is a
copy of its keys and values. Fused decoders of the C++ kernels keep the same bytes in another order within a group of
cells (cpu/csrc/attention.h).
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

MOST: Final = 127
SCALE_BYTES: Final = 4


def stored_shapes(
    shapes: Sequence[tuple[tuple[int, int], tuple[int, int]]], cache_dtype: torch.dtype
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return (heads, elements) of a cell of each layer's keys and values in caches of `cache_dtype`.

    `shapes` are those of the model: the number and size of the heads of keys, and of values.
    """
    scale = SCALE_BYTES if cache_dtype == torch.int8 else 0
    return [((k_heads, k_dim + scale), (v_heads, v_dim + scale)) for (k_heads, k_dim), (v_heads, v_dim) in shapes]


def head_size(cache: Tensor) -> int:
    """Return the number of elements of a head's key or value in `cache` [..., elements of a cell]."""
    return cache.shape[-1] - (SCALE_BYTES if cache.dtype == torch.int8 else 0)


def to_cells(x: Tensor) -> Tensor:
    """Round keys or values `x` [n, heads, dim] to cells: int8 [n, heads, dim + SCALE_BYTES].

    The highest magnitude of a head becomes 127. A head with an element that is not finite gets a scale of NaN.
    """
    x = x.float()
    highest = x.abs().amax(-1, keepdim=True)
    scale = highest / MOST
    is_finite = highest.isfinite()
    units = torch.where(is_finite & (scale >= torch.finfo(torch.float32).tiny), MOST / highest, 0.0)
    integers = torch.where(is_finite, x * units, 0.0).round().to(torch.int8)
    scale = torch.where(is_finite, scale, torch.nan)
    return torch.cat([integers, scale.view(torch.int8)], -1)


def from_cells(cells: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the keys or values of `dtype` [..., dim] that int8 `cells` [..., dim + SCALE_BYTES] stand for."""
    dim = head_size(cells)
    scale = cells[..., dim:].contiguous().view(torch.float32)
    return (cells[..., :dim].float() * scale).to(dtype)
