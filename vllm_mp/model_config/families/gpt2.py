"""GPT-2 and DialoGPT: the reader of their `config.json`, and their linear layers."""

from typing import Final

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
    with_own_names,
)
from vllm_mp.model_config.linear_layers import (
    ATTENDED,
    INNER,
    QUERY_KEY_VALUE,
    VOCABULARY,
    FamilyLayers,
    LinearLayer,
    Product,
)

_QKV: Final = LinearLayer("attn.c_attn", QUERY_KEY_VALUE, is_transposed=True)
_OUT: Final = LinearLayer("attn.c_proj", ATTENDED, by_inputs=True, is_transposed=True)
_UP: Final = LinearLayer("mlp.c_fc", INNER, is_transposed=True)
_DOWN: Final = LinearLayer("mlp.c_proj", INNER, by_inputs=True, is_transposed=True)
LAYERS: Final = FamilyLayers(
    "h",
    (_QKV, _OUT, _UP, _DOWN, LinearLayer("wte", VOCABULARY), LinearLayer("lm_head", VOCABULARY)),
    lambda arch, layer: [Product("", (part,)) for part in (_QKV, _OUT, _UP, _DOWN)],
    of_first_stage=("wte", "wpe", "lm_head"),
    of_last_stage=("ln_f",),
)
_OWN_NAMES: Final = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


def read_gpt2(name: str, config: Config) -> NativeArchitecture:
    config = with_own_names(config, _OWN_NAMES)
    hidden_size = integer(config, "n_embd")
    num_layers = integer(config, "n_layer")
    num_heads = integer(config, "n_head")
    head_dim = even_split(config, hidden_size, num_heads, "n_embd", "n_head")
    if flag(config, "add_cross_attention", False):
        raise ValueError("config field 'add_cross_attention' is true; only decoder-only models are supported (false)")
    scale = head_dim**-0.5 if flag(config, "scale_attn_weights", True) else 1.0
    by_layer = flag(config, "scale_attn_by_inverse_layer_idx", False)
    return NativeArchitecture(
        name=name,
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=optional_integer(config, "n_inner", None) or 4 * hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        max_position=integer(config, "n_positions", 1024),
        norm_eps=number(config, "layer_norm_epsilon", 1e-5),
        activation=activation(config, "activation_function", "gelu_new"),
        tie_word_embeddings=flag(config, "tie_word_embeddings", True),
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        qk_norm=False,
        sliding_window=(None,) * num_layers,
        attention_scale=tuple(scale / (layer + 1 if by_layer else 1) for layer in range(num_layers)),
        rope=None,
        dtype=dtype(config),
    )
