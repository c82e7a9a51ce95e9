"""Read the `config.json` of the Llama family: Llama, SmolLM, Mistral, Qwen2 and Qwen3.

A field that a configuration leaves out takes the default of the transformers class that would have read it.
"""

from vllm_mp.model_config.architecture import ACTIVATIONS, NativeArchitecture
from vllm_mp.model_config.config_json import (
    Config,
    choice,
    dtype,
    even_split,
    flag,
    integer,
    number,
    optional_integer,
    shorten,
)
from vllm_mp.model_config.rope import read_rope


def read_llama(name: str, config: Config) -> NativeArchitecture:
    bias = flag(config, "attention_bias", False)
    return _llama_family(
        name,
        config,
        max_position=2048,
        attention_bias=bias,
        attention_output_bias=bias,
        mlp_bias=flag(config, "mlp_bias", False),
    )


def read_mistral(name: str, config: Config) -> NativeArchitecture:
    layers = integer(config, "num_hidden_layers")
    window = optional_integer(config, "sliding_window", 4096)
    return _llama_family(name, config, max_position=131_072, num_kv_heads=8, sliding_window=(window,) * layers)


def read_qwen2(name: str, config: Config) -> NativeArchitecture:
    return _llama_family(
        name,
        config,
        max_position=32_768,
        num_kv_heads=32,
        attention_bias=True,
        sliding_window=_qwen_windows(config),
    )


def read_qwen3(name: str, config: Config) -> NativeArchitecture:
    bias = flag(config, "attention_bias", False)
    return _llama_family(
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


def _llama_family(
    name: str,
    config: Config,
    *,
    max_position: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    attention_bias: bool = False,
    attention_output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    sliding_window: tuple[int | None, ...] | None = None,
) -> NativeArchitecture:
    """Read the fields that the whole Llama family has; the keywords are the defaults and variations of one class."""
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
    rope = read_rope(config, max_position)
    if rope.type == "yarn":
        # A checkpoint may state the stretched length only through the factor (Qwen2.5 does).
        max_position = max(max_position, int(rope.factor * rope.original_max_position))
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
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        activation=choice(config, "hidden_act", "silu", ACTIVATIONS),
        tie_word_embeddings=flag(config, "tie_word_embeddings", False),
        attention_bias=attention_bias,
        attention_output_bias=attention_output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        sliding_window=sliding_window or (None,) * num_layers,
        attention_scale=(dim**-0.5,) * num_layers,
        rope=rope,
        dtype=dtype(config),
    )


def _qwen_windows(config: Config) -> tuple[int | None, ...]:
    """Return the window in tokens of each layer; None where a layer sees the whole context."""
    layers = integer(config, "num_hidden_layers")
    window = None
    if flag(config, "use_sliding_window", False):
        window = optional_integer(config, "sliding_window", 4096)
    types = config.get("layer_types")
    if types is None:
        first = integer(config, "max_window_layers", 28, minimum=0)
        return tuple(window if layer >= first else None for layer in range(layers))
    allowed = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != layers or any(kind not in allowed for kind in types):
        raise ValueError(
            f"config field 'layer_types' is {shorten(types)}; it must list {layers} entries "
            f"(num_hidden_layers), each one of {', '.join(allowed)}"
        )
    if window is None and "sliding_attention" in types:
        raise ValueError(
            "config field 'layer_types' names 'sliding_attention' but no window is set: set "
            "'use_sliding_window' to true and 'sliding_window' to a number of tokens, or make every layer "
            "'full_attention'"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)
