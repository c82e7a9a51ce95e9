"""The Llama family: readers of `config.json`, and the linear layers of the family.

The readers here are those of Llama, SmolLM, Mistral, Qwen2, Qwen3, Phi-3, Granite and OLMo 2.

A field that a configuration leaves out takes the default of the transformers class that would have read it.
"""

from typing import Any, Final

from vllm_mp.model_config.architecture import NativeArchitecture
from vllm_mp.model_config.config_json import (
    Config,
    activation,
    dtype,
    even_split,
    flag,
    integer,
    number,
    optional_integer,
    shorten,
)
from vllm_mp.model_config.linear_layers import (
    ATTENDED,
    GATE_AND_UP,
    HEADS,
    INNER,
    KV_HEADS,
    QUERY_KEY_VALUE,
    VOCABULARY,
    FamilyLayers,
    LinearLayer,
    Product,
)
from vllm_mp.model_config.rope import read_rope

_Q: Final = LinearLayer("q_proj", HEADS)
_K: Final = LinearLayer("k_proj", KV_HEADS)
_V: Final = LinearLayer("v_proj", KV_HEADS)
_QKV: Final = LinearLayer("qkv_proj", QUERY_KEY_VALUE)
_OUT: Final = LinearLayer("o_proj", ATTENDED, by_inputs=True)
_GATE: Final = LinearLayer("gate_proj", INNER)
_UP: Final = LinearLayer("up_proj", INNER)
_GATE_UP: Final = LinearLayer("gate_up_proj", GATE_AND_UP)
_DOWN: Final = LinearLayer("down_proj", INNER, by_inputs=True)


def _products(arch: NativeArchitecture, layer: int) -> list[Product]:
    """Return the products of a layer of the model; a mixture of experts has none of its MLP."""
    qkv, gate_up = ((_QKV,), (_GATE_UP,)) if arch.has_fused_projections else ((_Q, _K, _V), (_GATE, _UP))
    of_attention = [Product("self_attn.", qkv), Product("self_attn.", (_OUT,))]
    if arch.experts is not None and arch.experts.layers[layer]:
        return of_attention
    return [*of_attention, Product("mlp.", gate_up), Product("mlp.", (_DOWN,))]


LAYERS: Final = FamilyLayers(
    "layers",
    (
        *(_Q, _K, _V, _QKV, _OUT, _GATE, _UP, _GATE_UP, _DOWN),
        *(LinearLayer("embed_tokens", VOCABULARY), LinearLayer("lm_head", VOCABULARY)),
    ),
    _products,
    of_first_stage=("embed_tokens", "lm_head"),
    of_last_stage=("norm",),
)


def read_llama(name: str, config: Config) -> NativeArchitecture:
    bias = flag(config, "attention_bias", False)
    return llama_family(
        name,
        config,
        max_position=2048,
        attention_bias=bias,
        attention_output_bias=bias,
        mlp_bias=flag(config, "mlp_bias", False),
    )


def read_mistral(name: str, config: Config) -> NativeArchitecture:
    """Read Mistral, and Ministral, whose files say which layers have a window."""
    layers = integer(config, "num_hidden_layers")
    window = optional_integer(config, "sliding_window", 4096)
    types = layer_types(config, layers) or ["sliding_attention"] * layers
    windows = tuple(window if kind == "sliding_attention" else None for kind in types)
    return llama_family(name, config, max_position=131_072, num_kv_heads=8, sliding_window=windows)


def read_qwen2(name: str, config: Config) -> NativeArchitecture:
    return llama_family(
        name,
        config,
        max_position=32_768,
        num_kv_heads=32,
        attention_bias=True,
        sliding_window=_qwen_windows(config),
    )


def read_qwen3(name: str, config: Config) -> NativeArchitecture:
    bias = flag(config, "attention_bias", False)
    return llama_family(
        name,
        config,
        max_position=32_768,
        num_kv_heads=32,
        head_dim=128,
        attention_bias=bias,
        attention_output_bias=bias,
        qk_norm=True,
        sliding_window=_qwen_windows(config),
    )


def read_phi3(name: str, config: Config) -> NativeArchitecture:
    """Read Phi-3 and Phi-4."""
    layers = integer(config, "num_hidden_layers")
    window = optional_integer(config, "sliding_window", None)
    config = {"original_max_position_embeddings": 4096, **config}
    for field in ("rope_scaling", "rope_parameters"):
        given = config.get(field)
        if isinstance(given, dict) and given.get("rope_type", given.get("type")) in ("su", "yarn"):
            # As in transformers: the first files of Phi-3 have other names for LongRoPE.
            config[field] = {**given, "rope_type": "longrope"}
    return llama_family(
        name,
        config,
        max_position=4096,
        norm_eps=1e-5,
        may_be_partial=True,
        has_fused_projections=True,
        sliding_window=(window,) * layers,
    )


def read_granite(name: str, config: Config, **variations: Any) -> NativeArchitecture:
    layers = integer(config, "num_hidden_layers")
    bias = flag(config, "attention_bias", False)
    return llama_family(
        name,
        config,
        max_position=2048,
        attention_bias=bias,
        attention_output_bias=bias,
        mlp_bias=flag(config, "mlp_bias", False),
        attention_scale=(number(config, "attention_multiplier", 1.0),) * layers,
        input_multiplier=number(config, "embedding_multiplier", 1.0),
        residual_multiplier=number(config, "residual_multiplier", 1.0),
        logits_divisor=number(config, "logits_scaling", 1.0),
        **variations,
    )


def read_olmo2(name: str, config: Config) -> NativeArchitecture:
    bias = flag(config, "attention_bias", False)
    return llama_family(
        name,
        config,
        max_position=2048,
        norm_eps=1e-5,
        attention_bias=bias,
        attention_output_bias=bias,
        norm_place="after",
        norm_offset=0.0,
        qk_norm=True,
        norms_all_heads=True,
    )


def llama_family(
    name: str,
    config: Config,
    *,
    max_position: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    norm_eps: float = 1e-6,
    may_be_partial: bool = False,
    **variations: Any,
) -> NativeArchitecture:
    """Read the fields that the whole Llama family has.

    The named keywords are the defaults of one class, the `variations` fields of its `NativeArchitecture` that differ
    from those of Llama.
    """
    hidden_size = integer(config, "hidden_size")
    num_layers = integer(config, "num_hidden_layers")
    num_heads = integer(config, "num_attention_heads")
    kv_heads = optional_integer(config, "num_key_value_heads", num_kv_heads) or num_heads
    dim = optional_integer(config, "head_dim", head_dim) or even_split(config, hidden_size, num_heads)
    max_position = integer(config, "max_position_embeddings", max_position)
    if num_heads % kv_heads:
        raise ValueError(
            f"config field 'num_key_value_heads' is {kv_heads}; it must divide num_attention_heads ({num_heads})"
        )
    if dim % 2:
        raise ValueError(f"config field 'head_dim' is {dim}; rotary positions need an even number")
    rope = variations.get("rope") or read_rope(config, max_position, dim, may_be_partial=may_be_partial)
    if rope.type == "yarn":
        # A checkpoint may state the stretched length only through the factor (Qwen2.5 does).
        max_position = max(max_position, int(rope.factor * rope.original_max_position))
    elif rope.type == "linear" and "rope" not in variations:
        # `max_position_embeddings` is the context before it is stretched, as in vLLM, except for Gemma 3, which has
        # parameters for each type of layer.
        max_position = int(rope.factor * max_position)
    fields: dict[str, Any] = {
        "activation": activation(config, "hidden_act", "silu"),
        "tie_word_embeddings": flag(config, "tie_word_embeddings", False),
        "attention_bias": False,
        "attention_output_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "sliding_window": (None,) * num_layers,
        "attention_scale": (dim**-0.5,) * num_layers,
        "rope": rope,
    }
    return NativeArchitecture(
        name=name,
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=integer(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        max_position=max_position,
        norm_eps=number(config, "rms_norm_eps", norm_eps),
        dtype=dtype(config),
        **{**fields, **variations},
    )


def _qwen_windows(config: Config) -> tuple[int | None, ...]:
    """Return the window in tokens of each layer; None where a layer sees the whole context."""
    layers = integer(config, "num_hidden_layers")
    window = None
    if flag(config, "use_sliding_window", False):
        window = optional_integer(config, "sliding_window", 4096)
    types = layer_types(config, layers)
    if types is None:
        first = integer(config, "max_window_layers", 28, minimum=0)
        return tuple(window if layer >= first else None for layer in range(layers))
    return tuple(window if has_window else None for has_window in has_windows(types, window))


def has_windows(types: list[str], window: int | None) -> list[bool]:
    """Return whether each layer has a window; raises ValueError if a kind of layer needs a window and there is none."""
    if window is None and "sliding_attention" in types:
        raise ValueError(
            "config field 'layer_types' names 'sliding_attention' but no window is set: set "
            "'use_sliding_window' to true and 'sliding_window' to a number of tokens, or make every layer "
            "'full_attention'"
        )
    return [kind == "sliding_attention" for kind in types]


def layer_types(config: Config, num_layers: int) -> list[str] | None:
    """Return `layer_types`: "full_attention" or "sliding_attention" for each layer; None if the field is absent."""
    types = config.get("layer_types")
    allowed = ("full_attention", "sliding_attention")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in allowed for kind in types):
        raise ValueError(
            f"config field 'layer_types' is {shorten(types)}; it must list {num_layers} entries "
            f"(num_hidden_layers), each one of {', '.join(allowed)}"
        )
    return types
