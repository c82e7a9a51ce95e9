"""Read the `config.json` of Gemma 2, and of the text part of Gemma 3; `model_config.images` reads the rest.

A field that a configuration leaves out takes the default of the transformers class that would have read it.
"""

from typing import Any, Final

from vllm_mp.model_config.architecture import NativeArchitecture
from vllm_mp.model_config.config_json import (
    Config,
    activation,
    flag,
    integer,
    number,
    optional_integer,
    optional_number,
    shorten,
)
from vllm_mp.model_config.families.llama import layer_types, llama_family
from vllm_mp.model_config.images import read_image_config
from vllm_mp.model_config.rope import Rope, read_layer_rope

_GLOBAL_THETA: Final = 1_000_000.0
_LOCAL_THETA: Final = 10_000.0
_GEMMA3_SIZES: Final[Config] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
"""The sizes that files of models of text and images leave out."""


def read_gemma2(name: str, config: Config) -> NativeArchitecture:
    layers = integer(config, "num_hidden_layers")
    return _gemma_family(
        name,
        {"final_logit_softcapping": 30.0, **config},
        max_position=8192,
        attention_soft_cap=optional_number({"attn_logit_softcapping": 50.0, **config}, "attn_logit_softcapping"),
        sliding_window=_windows(config, layers, period=2),
    )


def read_gemma3(name: str, config: Config) -> NativeArchitecture:
    """Read Gemma 3; `text_config` has the fields of a model of text and images.

    As in transformers, `attn_logit_softcapping`, a field of Gemma 2 that some files keep, has no effect.
    """
    if name == "Gemma3ForConditionalGeneration":
        read_image_config(config)
        config = _text_fields(config)
    layers = integer(config, "num_hidden_layers")
    max_position = integer(config, "max_position_embeddings", 131_072)
    head_dim = integer(config, "head_dim", 256)
    rope, local_rope = _ropes(config, max_position, head_dim)
    return _gemma_family(
        name,
        config,
        max_position=max_position,
        sliding_window=_windows(config, layers, integer(config, "sliding_window_pattern", 6)),
        qk_norm=True,
        rope=rope,
        local_rope=local_rope,
    )


def _text_fields(config: Config) -> Config:
    """Return the fields for the text part of a model of text and images, which are those that transformers uses."""
    text = config.get("text_config") or {}
    if not isinstance(text, dict):
        raise ValueError(f"config field 'text_config' is {shorten(text)}; it must be an object")
    of_all = {field: config[field] for field in ("dtype", "torch_dtype") if field in config}
    is_tied = flag(config, "tie_word_embeddings", True)
    return {**_GEMMA3_SIZES, **of_all, **text, "tie_word_embeddings": is_tied, "final_logit_softcapping": None}


def _gemma_family(name: str, config: Config, **variations: Any) -> NativeArchitecture:
    """Read the fields that Gemma 2 and Gemma 3 share."""
    if config.get("use_bidirectional_attention"):
        raise ValueError("config field 'use_bidirectional_attention' is true; only causal attention is supported")
    bias = flag(config, "attention_bias", False)
    scale = number(config, "query_pre_attn_scalar", 256) ** -0.5
    return llama_family(
        name,
        config,
        num_kv_heads=4,
        head_dim=256,
        activation=activation(config, "hidden_activation", "gelu_pytorch_tanh"),
        tie_word_embeddings=flag(config, "tie_word_embeddings", True),
        attention_bias=bias,
        attention_output_bias=bias,
        attention_scale=(scale,) * integer(config, "num_hidden_layers"),
        logits_soft_cap=optional_number(config, "final_logit_softcapping"),
        embedding_scale=integer(config, "hidden_size") ** 0.5,
        norm_place="around",
        norm_offset=1.0,
        exceeds_float16=True,
        **variations,
    )


def _windows(config: Config, num_layers: int, period: int) -> tuple[int | None, ...]:
    """Return the window of each layer; where `layer_types` is absent, every `period`-th layer has none."""
    window = optional_integer(config, "sliding_window", 4096)
    types = layer_types(config, num_layers)
    if types is None:
        return tuple(window if (layer + 1) % period else None for layer in range(num_layers))
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _ropes(config: Config, max_position: int, head_dim: int) -> tuple[Rope, Rope]:
    """Return the rotary parameters of the layers that see the whole context, and of those with a window.

    Older files have `rope_theta` and `rope_scaling` for the first, and `rope_local_base_freq` for the second.
    """
    scaling = config.get("rope_scaling")
    if scaling:
        # As in transformers: the scaling completes what there is, so that `type` does not replace `rope_type`.
        given = config.get("rope_parameters") or {"full_attention": {"rope_type": "default"}}
        full = {**(given.get("full_attention") or {}), **scaling}
        config = {**config, "rope_parameters": {**given, "full_attention": full}}
    theta = number(config, "rope_theta", _GLOBAL_THETA)
    local_theta = number(config, "rope_local_base_freq", _LOCAL_THETA)
    return (
        read_layer_rope(config, "full_attention", theta, max_position, head_dim),
        read_layer_rope(config, "sliding_attention", local_theta, max_position, head_dim),
    )
