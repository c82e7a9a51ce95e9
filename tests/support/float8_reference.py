"""Models of transformers that use 8-bit floats as the engine does, computed by kernels/reference.py."""

import copy
import functools
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from vllm_mp.kernels import reference

_NAME = "vllm_mp_float8_cache"


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
    """Attention over keys and values that were rounded to 8-bit floats, as in a cache."""
    key, value = (reference.to_float8(x).to(x.dtype) for x in (key, value))
    return sdpa_attention_forward(module, query, key, value, *args, **options)


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, sdpa_mask)


def in_float8(model: nn.Module, *, weights: bool = True, cache: bool = True) -> Any:
    """Return a copy of `model` with projections (`weights`) and keys and values (`cache`) in 8-bit floats."""
    changed: Any = copy.deepcopy(model)
    if cache:
        changed.set_attn_implementation(_NAME)
    if weights:
        for name, module in changed.named_modules():
            if isinstance(module, nn.Linear) and name != "lm_head":
                weight, scale = reference.quantize_rows(module.weight.detach(), 1)
                module.forward = functools.partial(reference.linear, weight=weight, bias=module.bias, scale=scale)
    return changed
