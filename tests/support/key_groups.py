"""Caches in the order in which the fused decoders of the C++ kernels keep them (csrc/attention.h)."""

import torch
from torch import Tensor

from vllm_mp.kernels import int8_cache
from vllm_mp.kernels.cpu.library import Library


def keys_in_groups(cache: Tensor, kernels: Library) -> Tensor:
    """Return `cache` [num_blocks, block_size, heads, dim] in groups, if they divide the blocks; of the same shape."""
    width, per_word = _group_size(cache, kernels), _per_word(cache)
    words = cache.reshape(-1, width, cache.shape[2], cache.shape[3] // per_word, per_word)
    return words.permute(0, 2, 3, 1, 4).reshape(cache.shape).contiguous()


def keys_in_order(cache: Tensor, kernels: Library) -> Tensor:
    """Undo `keys_in_groups`."""
    width, per_word = _group_size(cache, kernels), _per_word(cache)
    words = cache.reshape(-1, cache.shape[2], cache.shape[3] // per_word, width, per_word)
    return words.permute(0, 3, 1, 2, 4).reshape(cache.shape).contiguous()


def cells_in_groups(cells: Tensor, kernels: Library, *, are_keys: bool) -> Tensor:
    """Return int8 cells [num_blocks, block_size, heads, dim + 4] of keys or values in groups; of the same shape."""
    width, dim = _group_size(cells, kernels), int8_cache.head_size(cells)
    groups = cells.reshape(-1, width, *cells.shape[2:]).transpose(1, 2)
    integers, scales = groups[..., :dim], groups[..., dim:]
    parts = [part.flatten(2) for part in (integers.transpose(2, 3) if are_keys else integers, scales)]
    return torch.cat(parts, -1).reshape(cells.shape).contiguous()


def cells_in_order(cells: Tensor, kernels: Library, *, are_keys: bool) -> Tensor:
    """Undo `cells_in_groups`."""
    width, dim, heads = _group_size(cells, kernels), int8_cache.head_size(cells), cells.shape[2]
    groups = cells.reshape(-1, heads, width * cells.shape[3])
    integers, scales = groups.split([width * dim, groups.shape[2] - width * dim], -1)
    rows = integers.unflatten(-1, (dim, width)).transpose(2, 3) if are_keys else integers.unflatten(-1, (width, dim))
    ordered = torch.cat([rows, scales.unflatten(-1, (width, int8_cache.SCALE_BYTES))], -1)
    return ordered.transpose(1, 2).reshape(cells.shape).contiguous()


def _group_size(cache: Tensor, kernels: Library) -> int:
    width = kernels.panel_columns // 2
    return width if cache.shape[1] % width == 0 else 1


def _per_word(cache: Tensor) -> int:
    return 4 // cache.dtype.itemsize
