"""Attention of prefills by FlashAttention, if it is installed (Dao et al. 2022, Dao 2023, Shah et al. 2024).

Version 3, the module `flash_attn_interface`, runs on compute capability 9.0; version 2, the package `flash_attn`, on
8.0 and later. Decodes stay with another kernel, which can be captured in a graph whatever version is installed.
"""

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_mp.kernels.attention_metadata import AttentionMetadata, PagedAttention

MAX_HEAD_DIM = 256


class _Version(NamedTuple):
    name: str
    module: str
    function: str
    takes: frozenset[str]
    """The arguments that its function must take; without them it is too old."""
    block_multiple: int
    """The size of a block of the cache must be a multiple of this."""


_THREE = _Version(
    "FlashAttention-3",
    "flash_attn_interface",
    "flash_attn_with_kvcache",
    frozenset({"cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q", "window_size", "softcap"}),
    1,
)
_TWO = _Version(
    "FlashAttention-2",
    "flash_attn",
    "flash_attn_varlen_func",
    frozenset({"cu_seqlens_k", "max_seqlen_k", "block_table", "window_size", "softcap"}),
    256,
)


class Prefills(NamedTuple):
    """The prefills of a step, as FlashAttention takes them."""

    q: Tensor  # [num_tokens, num_heads, head_dim]
    k_cache: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    v_cache: Tensor  # like k_cache
    query_start: Tensor  # int32 [num_rows + 1], from 0
    seq_lens: Tensor  # int32 [num_rows]
    block_table: Tensor  # int32 [num_rows, max_blocks]
    max_query_len: int
    max_seq_len: int
    scale: float
    window: tuple[int, int]
    """The number of keys before and after its own position that a query sees; -1: all."""
    soft_cap: float
    """0: no soft cap."""


ComputePrefills = Callable[[Prefills], Tensor]
"""Returns [num_tokens, num_heads, head_dim]."""


def load(capability: tuple[int, int], block_size: int) -> ComputePrefills:
    """Return FlashAttention for a GPU of that compute capability and blocks of `block_size` tokens.

    Raises LookupError with the reason and the remedy if there is none.
    """
    if capability < (8, 0):
        raise LookupError(
            f"it needs compute capability 8.0, and the device has {capability[0]}.{capability[1]}; set 'triton'"
        )
    reasons = []
    for version, attend in ((_THREE, _attend_three), (_TWO, _attend_two)):
        if version is _THREE and capability[0] != 9:
            continue
        try:
            return functools.partial(attend, _import(version, block_size))
        except LookupError as error:
            reasons.append(f"{version.name} {error}")
    raise LookupError("; ".join(reasons))


def is_installed() -> bool:
    """Tell whether any version is installed, usable or not; imports nothing."""
    return any(importlib.util.find_spec(version.module) for version in (_THREE, _TWO))


def paged_attention(
    prefill: ComputePrefills,
    fallback: PagedAttention,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Compute `ops.paged_attention`: the prefills by `prefill`, the decodes by `fallback`.

    `fallback` computes the whole step with `metadata.isolates` or `metadata.attention_ends`, which FlashAttention does
    not support.
    """
    num_decodes = metadata.num_decodes
    options = (scale, sliding_window, soft_cap)
    only_decodes = num_decodes == metadata.seq_lens.shape[0]
    if only_decodes or metadata.isolates or metadata.attention_ends is not None:
        return fallback(q, k_cache, v_cache, metadata, *options)
    prefilled = prefill(
        Prefills(
            q[num_decodes:],
            k_cache,
            v_cache,
            metadata.query_start[num_decodes:] - num_decodes if num_decodes else metadata.query_start,
            metadata.seq_lens[num_decodes:],
            metadata.block_table[num_decodes:],
            max(metadata.query_lens[num_decodes:]),
            max(metadata.host_seq_lens[num_decodes:]),
            scale,
            (sliding_window - 1, 0) if sliding_window else (-1, -1),
            soft_cap or 0.0,
        )
    )
    if not num_decodes:
        return prefilled
    decodes = metadata._replace(
        query_start=metadata.query_start[: num_decodes + 1],
        seq_lens=metadata.seq_lens[:num_decodes],
        block_table=metadata.block_table[:num_decodes],
        cell_mapping=metadata.cell_mapping[:num_decodes],
        query_lens=metadata.query_lens[:num_decodes],
        host_seq_lens=metadata.host_seq_lens[:num_decodes],
        max_seq_len=max(metadata.host_seq_lens[:num_decodes]),
    )
    return torch.cat((fallback(q[:num_decodes], k_cache, v_cache, decodes, *options), prefilled))


def _import(version: _Version, block_size: int) -> Callable[..., Any]:
    if importlib.util.find_spec(version.module) is None:
        raise LookupError(f"is not installed (module {version.module})")
    if block_size % version.block_multiple:
        raise LookupError(
            f"takes blocks of a multiple of {version.block_multiple} tokens; set block_size={version.block_multiple}"
        )
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(version.module), version.function)
        missing = version.takes - inspect.signature(function).parameters.keys()
    except Exception as error:  # a build for another torch fails in many ways
        raise LookupError(f"cannot be imported: {error!r}; install a build for torch {torch.__version__}") from error
    if missing:
        raise LookupError(
            f"is too old: its {version.function} lacks {', '.join(sorted(missing))}; install a later version"
        )
    return function


def _attend_three(function: Callable[..., Any], prefills: Prefills) -> Tensor:
    attended: Tensor = function(
        prefills.q,
        prefills.k_cache,
        prefills.v_cache,
        cache_seqlens=prefills.seq_lens,
        page_table=prefills.block_table,
        cu_seqlens_q=prefills.query_start,
        max_seqlen_q=prefills.max_query_len,
        softmax_scale=prefills.scale,
        causal=True,
        window_size=prefills.window,
        softcap=prefills.soft_cap,
    )
    return attended


def _attend_two(function: Callable[..., Any], prefills: Prefills) -> Tensor:
    attended: Tensor = function(
        prefills.q,
        prefills.k_cache,
        prefills.v_cache,
        cu_seqlens_q=prefills.query_start,
        # It takes cumulative lengths.
        cu_seqlens_k=F.pad(prefills.seq_lens.cumsum(0, dtype=torch.int32), (1, 0)),
        max_seqlen_q=prefills.max_query_len,
        max_seqlen_k=prefills.max_seq_len,
        softmax_scale=prefills.scale,
        causal=True,
        window_size=prefills.window,
        softcap=prefills.soft_cap,
        block_table=prefills.block_table,
    )
    return attended
