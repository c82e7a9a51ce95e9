"""Paged attention: decodes with their context split over programs, prefills in tiles of queries.

The query heads that share a KV head are rows of one tile, so that keys and values are read once for all of them. No
launch depends on numbers that only the device knows, so it can be captured in a CUDA graph and replayed for other rows.
"""

import torch
from torch import Tensor

from vllm_mp.kernels import reference
from vllm_mp.kernels.attention_metadata import AttentionMetadata
from vllm_mp.kernels.triton.attention.decode import decode
from vllm_mp.kernels.triton.attention.prefill import prefill
from vllm_mp.kernels.triton.launch import MAX_HEAD_DIM


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """See `ops.paged_attention`; decodes without a context, which pad a batch, get zeros.

    Later tokens that are not finite never affect a query, with or without `metadata.isolates`. `reference` computes
    heads that are too long for the kernels.
    """
    if not takes_heads(k_cache.shape[3], v_cache.shape[3]):
        return reference.paged_attention(q, k_cache, v_cache, metadata, scale, sliding_window, soft_cap)
    if q.stride(2) != 1:
        q = q.contiguous()
    out = torch.empty((*q.shape[:2], v_cache.shape[3]), dtype=q.dtype, device=q.device)
    if metadata.num_decodes or metadata.row_counts is not None:
        decode(q, k_cache, v_cache, metadata, scale, sliding_window, soft_cap, out)
    if metadata.num_decodes < metadata.seq_lens.shape[0]:
        prefill(q, k_cache, v_cache, metadata, scale, sliding_window, soft_cap, out)
    return out


def takes_heads(key_dim: int, value_dim: int) -> bool:
    """Tell whether the kernels take heads of these sizes."""
    return max(key_dim, value_dim) <= MAX_HEAD_DIM
