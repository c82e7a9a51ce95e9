"""The share of a rank in a model of transformers, by the plan that the library has for splitting it.

The plan names linear layers that are split by outputs ("colwise") or by inputs ("rowwise"). The outputs of the latter
are summed over the ranks. Every rank holds all other layers whole, also embedding and head.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vllm_mp.core.collectives.group import RankGroup


class CannotSplitError(ValueError):
    """Raised for a model that cannot be shared among the ranks."""


def split_model(causal: Any, group: RankGroup, name: str) -> None:
    """Keep only the share of the group's rank in `causal`, a model of transformers with its weights.

    The module is still whole in name: its attention finds the number of its heads in the shapes. Raises
    CannotSplitError, naming the option and `name`, the architecture, if the library has no plan or one that is not
    served.
    """
    if group.size == 1:
        return
    config = causal.config.get_text_config()
    plan: Mapping[str, str] | None = getattr(config, "base_model_tp_plan", None)
    if not plan:
        raise _refusal(group, name, "transformers has no plan to split it")
    if kinds := {kind for kind in plan.values() if kind not in ("colwise", "rowwise")}:
        raise _refusal(group, name, f"transformers' plan splits layers by {', '.join(sorted(kinds))}")
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if config.num_attention_heads % group.size or (kv_heads % group.size and group.size % kv_heads):
        raise _refusal(
            group, name, f"its {config.num_attention_heads} heads, {kv_heads} of keys and values, cannot be shared out"
        )
    split = 0
    for path, module in causal.base_model.named_modules():
        kind = next((kind for pattern, kind in plan.items() if _matches(pattern, path)), None)
        if kind is None:
            continue
        if not isinstance(module, nn.Linear):
            raise _refusal(group, name, f"{path} is not a linear layer but {type(module).__name__}")
        copies = max(1, group.size // kv_heads) if path.endswith((".k_proj", ".v_proj")) else 1
        _split(path, module, kind == "rowwise", group, copies, name)
        split += 1
    if not split:
        raise _refusal(group, name, "transformers' plan names none of its layers")


def _split(path: str, linear: nn.Linear, by_inputs: bool, group: RankGroup, copies: int, name: str) -> None:
    """Keep the rank's part of `linear`, which `copies` ranks share."""
    total, parts = (linear.in_features if by_inputs else linear.out_features), group.size // copies
    if total % parts:
        raise _refusal(group, name, f"{path} has {total} {'inputs' if by_inputs else 'outputs'}")
    size, part = total // parts, group.rank // copies

    def own(tensor: Tensor, dimension: int) -> nn.Parameter:
        kept = tensor.narrow(dimension, part * size, size).clone(memory_format=torch.contiguous_format)
        return nn.Parameter(kept, requires_grad=False)

    with torch.no_grad():
        linear.weight = own(linear.weight, int(by_inputs))
        if by_inputs:
            linear.in_features = size
            if linear.bias is not None and group.rank:
                linear.bias = nn.Parameter(torch.zeros_like(linear.bias), requires_grad=False)
            linear.register_forward_hook(lambda _module, _inputs, output: group.sum(output))
        else:
            linear.out_features = size
            if linear.bias is not None:
                linear.bias = own(linear.bias, 0)


def _matches(pattern: str, path: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), path) is not None


def _refusal(group: RankGroup, name: str, reason: str) -> CannotSplitError:
    return CannotSplitError(
        f"tensor_parallel_size={group.size}: {name} cannot be shared among ranks: {reason}; set it to 1"
    )
