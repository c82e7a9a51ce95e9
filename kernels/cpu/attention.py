"""Paged attention by the C++ kernels."""

import ctypes

import torch
from torch import Tensor

from vllm_mp.kernels.attention_metadata import AttentionMetadata
from vllm_mp.kernels.cpu.library import DTYPES, CAttentionMetadata, CHeads, Library
from vllm_mp.kernels.int8_cache import head_size


def can_attend(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Tell whether the kernels take these tensors: on the CPU, of a supported dtype, with heads of an even size."""
    return (
        q.device.type == "cpu"
        and q.dtype in DTYPES
        and k_cache.dtype == v_cache.dtype
        and k_cache.dtype in (q.dtype, torch.int8)
        and q.shape[-1] % 2 == 0
        and k_cache.is_contiguous()
        and v_cache.is_contiguous()
    )


def attend(
    library: Library,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Compute `ops.paged_attention` for tensors that `can_attend` accepts.

    Results are batch-invariant: the sums of a query run over the keys in the same order in any chunk or batch.
    """
    if q.stride(2) != 1 or q.stride(1) != q.shape[2]:
        q = q.contiguous()
    value_dim = head_size(v_cache)
    out = torch.empty((*q.shape[:2], value_dim), dtype=q.dtype)
    heads = CHeads(q.shape[1], k_cache.shape[2], q.shape[2], value_dim, sliding_window or 0, scale, soft_cap or 0.0)
    step = c_metadata(metadata, k_cache)
    library.function("attention", q.dtype)(
        ctypes.byref(step),
        ctypes.byref(heads),
        q.data_ptr(),
        q.stride(0),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def c_metadata(metadata: AttentionMetadata, cache: Tensor) -> CAttentionMetadata:
    """Convert `metadata` of a step over caches like `cache` [num_blocks, block_size, ...] for the kernels.

    The result points into the tensors of `metadata`, which must outlive it.
    """
    return CAttentionMetadata(
        metadata.cell_mapping.shape[0],
        metadata.seq_lens.shape[0],
        metadata.query_start.data_ptr(),
        metadata.seq_lens.data_ptr(),
        metadata.block_table.data_ptr(),
        metadata.block_table.stride(0),
        cache.shape[1],
        metadata.cell_mapping.data_ptr(),
        metadata.isolates,
        None if metadata.attention_ends is None else metadata.attention_ends.data_ptr(),
        cache.dtype == torch.int8,
    )
