"""Paged attention by the C++ kernels."""

import ctypes

import torch
from torch import Tensor

from vllm_mp.kernels.attention_metadata import AttentionMetadata
from vllm_mp.kernels.cpu.library import DTYPES, CAttentionMetadata, CHeads, Library


def can_attend(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Tell whether the kernels take these tensors: on the CPU, of a supported dtype, with heads of an even size."""
    return (
        q.device.type == "cpu"
        and q.dtype in DTYPES
        and q.dtype == k_cache.dtype == v_cache.dtype
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
    out = torch.empty((*q.shape[:2], v_cache.shape[-1]), dtype=q.dtype)
    heads = CHeads(
        q.shape[1], k_cache.shape[2], q.shape[2], v_cache.shape[3], sliding_window or 0, scale, soft_cap or 0.0
    )
    step = c_metadata(metadata, k_cache.shape[1])
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


def c_metadata(metadata: AttentionMetadata, block_size: int) -> CAttentionMetadata:
    """Convert `metadata` for the kernels; the result points into its tensors, which must outlive it."""
    return CAttentionMetadata(
        metadata.cell_mapping.shape[0],
        metadata.seq_lens.shape[0],
        metadata.query_start.data_ptr(),
        metadata.seq_lens.data_ptr(),
        metadata.block_table.data_ptr(),
        metadata.block_table.stride(0),
        block_size,
        metadata.cell_mapping.data_ptr(),
        metadata.isolates,
        None if metadata.attention_ends is None else metadata.attention_ends.data_ptr(),
    )
