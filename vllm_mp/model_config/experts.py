"""The experts of a model, and the fields of a `config.json` that describe them."""

from typing import Any

import msgspec

from vllm_mp.model_config.config_json import Config, integer, shorten


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """MLPs among which a router chooses some for each token (Shazeer et al. 2017)."""

    layers: tuple[bool, ...]
    """One entry per layer; False: the layer has one MLP for all tokens."""
    num_experts: int
    num_chosen: int
    """The number of experts that compute a token."""
    intermediate_size: int
    shared_intermediate_size: int = 0
    """The size of an expert that computes every token, with a gate of its own; 0: there is none."""
    normalizes_weights: bool = True
    """True: the router's weights of a token's experts are divided by their sum."""
    rounds_weights: bool = True
    """True: the router's weights are rounded to the model's dtype."""


def read_experts(
    config: Config, field: str, num_experts: int, num_chosen: int, *, has_dense_layers: bool = False, **fields: Any
) -> Experts:
    """Read the experts, whose number is the field `field`; the numbers are defaults.

    With `has_dense_layers`, Qwen's fields may leave layers without experts. `fields` are the fields of `Experts` that
    each class reads itself.
    """
    experts = integer(config, field, num_experts)
    chosen = integer(config, "num_experts_per_tok", num_chosen)
    if chosen > experts:
        raise ValueError(f"config field 'num_experts_per_tok' is {chosen}; it must be at most {field} ({experts})")
    return Experts(
        layers=_layers_with_experts(config) if has_dense_layers else (True,) * integer(config, "num_hidden_layers"),
        num_experts=experts,
        num_chosen=chosen,
        **fields,
    )


def _layers_with_experts(config: Config) -> tuple[bool, ...]:
    """Return for each layer whether it has experts."""
    layers = range(integer(config, "num_hidden_layers"))
    step = integer(config, "decoder_sparse_step", 1)
    without = config.get("mlp_only_layers") or []
    if not isinstance(without, list) or not all(isinstance(layer, int) for layer in without):
        raise ValueError(f"config field 'mlp_only_layers' is {shorten(without)}; it must list numbers of layers")
    return tuple(layer not in without and (layer + 1) % step == 0 for layer in layers)
