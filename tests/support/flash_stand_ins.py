"""Stand-ins for FlashAttention's functions: the same signatures, computed by kernels/reference.py."""

from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from vllm_mp.kernels import reference
from vllm_mp.kernels.attention_metadata import AttentionMetadata


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float | None,
    window: Sequence[int],
    soft_cap: float,
) -> Tensor:
    for tensor in (query_start, seq_lens, block_table):
        assert tensor.dtype == torch.int32
        assert tensor.stride(-1) == 1
    assert len(query_start) == len(seq_lens) + 1 == len(block_table) + 1
    assert query_start[0] == 0
    assert query_start[-1] == len(q)
    assert scale is not None
    # No window is (-1, -1); a window of n keys is (n - 1, 0).
    assert tuple(window) == (-1, -1) or (window[0] >= 0 and window[1] == 0)
    metadata = AttentionMetadata(
        query_start=query_start,
        seq_lens=seq_lens,
        block_table=block_table,
        cell_mapping=torch.empty(0, dtype=torch.int64),
        query_lens=query_start.diff().tolist(),
        host_seq_lens=seq_lens.tolist(),
        num_decodes=0,
        max_seq_len=int(seq_lens.max()),
    )
    sliding = None if window[0] < 0 else window[0] + 1
    return reference.paged_attention(q, k_cache, v_cache, metadata, scale, sliding, soft_cap or None)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
):
    """FlashAttention-3's function, from hopper/flash_attn_interface.py."""
    assert causal
    assert max_seqlen_q == cu_seqlens_q.diff().max()
    return _attend(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, softmax_scale, window_size, softcap)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """FlashAttention-2's function, from flash_attn/flash_attn_interface.py, version 2.6 or later."""
    assert causal
    assert dropout_p == 0
    assert cu_seqlens_k.dtype == torch.int32
    seq_lens = cu_seqlens_k.diff()
    assert (max_seqlen_q, max_seqlen_k) == (cu_seqlens_q.diff().max(), seq_lens.max())
    return _attend(q, k, v, cu_seqlens_q, seq_lens, block_table, softmax_scale, window_size, softcap)


def module(name: str, **functions: Any) -> ModuleType:
    """Return a module of that name, which can be found and imported like an installed one."""
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    for attribute, function in functions.items():
        setattr(made, attribute, function)
    return made
