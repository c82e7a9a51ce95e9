"""The attention function through which models of transformers use the paged KV cache.

The library's registries of attention functions and of masks hold it under two names: `SERVING` for the steps of the
engine, and `MASKED` for the probe, where the model passes its masks.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from vllm_mp.kernels import ops
from vllm_mp.kernels.attention_metadata import AttentionMetadata, PagedAttention

SERVING: Final = "vllm_mp"
"""Our attention function. The library makes no mask for a name that its registry of masks does not hold."""
MASKED: Final = "vllm_mp_masked"
"""The same function, with the masks that the model asks for."""


class Call(NamedTuple):
    """One call of attention in a probe; `q`, `k`, `v` [num_tokens, heads, dim]."""

    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Any
    window: int | None
    others: Mapping[str, Any]


class Layer(NamedTuple):
    """One attention module: the index of its cache, and its window in tokens (None: the whole context)."""

    cache: int
    window: int | None


class Paging:
    """The state that the attention modules of one model share: the running step, or the calls of a probe."""

    def __init__(self) -> None:
        self.attend: PagedAttention = ops.paged_attention
        self.layers: dict[nn.Module, Layer] = {}
        self.kv_caches: list[tuple[Tensor, Tensor]] = []
        self.metadata: AttentionMetadata | None = None
        self.calls: list[Call] | None = None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend over the paged KV cache, or record the call in a probe, where each token attends only to itself.

    `query`, `key` and `value` are [1, heads, num_tokens, dim], the result is [1, num_tokens, heads, dim].
    """
    paging = cast("Paging", module.paging)
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    if paging.calls is not None:
        paging.calls.append(Call(module, q, k, v, attention_mask, sliding_window, others))
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1).unsqueeze(0), None
    assert paging.metadata is not None
    layer = paging.layers[module]
    cache = paging.kv_caches[layer.cache]
    ops.write_kv(k, v, *cache, paging.metadata.cell_mapping)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    return paging.attend(q, *cache, paging.metadata, scale, layer.window, softcap).unsqueeze(0), None


def _mask(
    *, q_length: int, kv_length: int, mask_function: Callable[..., Tensor], local_size: int | None = None, **_: Any
) -> Tensor:
    """Return a mask, bool [1, 1, q_length, kv_length], that carries the library's rule for it, and its window."""
    mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool)
    vars(mask).update(rule=mask_function, window=local_size)
    return mask


AttentionInterface.register(SERVING, _attention)
AttentionInterface.register(MASKED, _attention)
AttentionMaskInterface.register(MASKED, _mask)
