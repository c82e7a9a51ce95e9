"""Models of transformers whose keys and values are rounded as in a KV cache of 8 bits."""

import copy
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from vllm_mp.kernels import int8_cache

_NAME = "vllm_mp_int8_cache"


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
    """Attention over keys and values that were rounded as in a cache."""
    key, value = (int8_cache.from_cells(int8_cache.to_cells(x), x.dtype) for x in (key, value))
    return sdpa_attention_forward(module, query, key, value, *args, **options)


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, sdpa_mask)


def with_int8_cache(model: nn.Module) -> Any:
    """Return a copy of `model` with keys and values in 8 bits."""
    changed: Any = copy.deepcopy(model)
    changed.set_attn_implementation(_NAME)
    return changed
