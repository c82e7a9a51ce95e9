"""The keys of a cache in the order in which the fused decoders of the C++ kernels keep them (csrc/attention.h)."""

from torch import Tensor

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


def _group_size(cache: Tensor, kernels: Library) -> int:
    width = kernels.panel_columns // 2
    return width if cache.shape[1] % width == 0 else 1


def _per_word(cache: Tensor) -> int:
    return 4 // cache.dtype.itemsize
