"""What a model looks like: the normalised form of a Hugging Face `config.json`.

Nothing here needs torch or transformers, so the client half can read a model's shape too. A field that a
configuration leaves out takes the default of the transformers class that would have read it.
"""

from collections.abc import Callable
from typing import Final

import msgspec

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
from vllm_mp.model_config.quantization import Fp8Scales, read_fp8_scales
from vllm_mp.model_config.rope import Rope, read_rope, rope_variants

ACTIVATIONS: Final = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder or an encoder: what the engine must know of it, whoever's code runs it.

    `max_position` is the longest context in tokens that the model is made for.
    """

    name: str
    vocab_size: int
    hidden_size: int
    max_position: int
    dtype: str | None
    is_encoder: bool = False
    """Every token sees the whole prompt, there is no cache, and no text is generated."""

    @classmethod
    def from_hf_config(cls, config: Config) -> "Architecture":
        """Read the contents of a `config.json`, in the form of transformers v5 or of older hub files.

        The result is a `NativeArchitecture` for a name in `SUPPORTED`; any other is left to transformers'
        own module, which knows whether it can run. Raises ValueError, naming the field, its value and what
        is allowed, for a checkpoint quantized in a way that is not supported, a model that is not a decoder
        over a KV cache alone, and fields that are missing, ill-typed, contradictory or unsupported.
        """
        name = architecture_name(config)
        scales = read_fp8_scales(name, config)
        if name not in _READERS:
            return _read_other(name, config)
        return msgspec.structs.replace(_READERS[name](name, config), fp8=scales)


class NativeArchitecture(Architecture, frozen=True, kw_only=True):
    """A model that has a native module: its family, sizes and variations.

    `sliding_window` and `attention_scale` have one entry a layer: the window in tokens (None: the whole
    context) and what multiplies query-key products. `rope` is None for learned positions. Lowering
    `max_position` (`msgspec.structs.replace`) changes no frequency.
    """

    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    tie_word_embeddings: bool
    attention_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: tuple[int | None, ...]
    attention_scale: tuple[float, ...]
    rope: Rope | None
    num_token_types: int = 0
    """Rows of an encoder's table of token types, of which the first is taken; 0: there is no table."""
    position_offset: int = 0
    """Rows of the table of learned positions that come before the first position's."""
    fp8: Fp8Scales | None = None
    """The scales of the projections' weights where these are kept in 8-bit floats."""

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of KV cache that one token takes over all layers, at `dtype_bytes` an element; 0 for an encoder."""
        return dtype_bytes * sum(heads * dim for layer in self.kv_shapes for heads, dim in layer)

    @property
    def kv_shapes(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """What one token leaves in each layer's cache: (heads, dim) of its keys, and of its values."""
        if self.is_encoder:
            return []
        shape = (self.num_kv_heads, self.head_dim)
        return [(shape, shape)] * self.num_layers


def architecture_name(config: Config) -> str:
    """The architecture that a configuration names, or that its `model_type` implies.

    Raises ValueError when it says neither.
    """
    names = config.get("architectures")
    if isinstance(names, list | tuple) and names and isinstance(names[0], str):
        return names[0]
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in _BY_MODEL_TYPE:
        return _BY_MODEL_TYPE[model_type]
    raise ValueError(
        f"config has no usable 'architectures' (got {names!r}), and its 'model_type' {model_type!r} is none "
        f'of {", ".join(_BY_MODEL_TYPE)}; add "architectures": [one of {", ".join(SUPPORTED)}] to config.json'
    )


def _read_llama(name: str, config: Config) -> NativeArchitecture:
    bias = flag(config, "attention_bias", False)
    return _llama_family(
        name,
        config,
        max_position=2048,
        attention_bias=bias,
        attention_output_bias=bias,
        mlp_bias=flag(config, "mlp_bias", False),
    )


def _read_mistral(name: str, config: Config) -> NativeArchitecture:
    layers = integer(config, "num_hidden_layers")
    window = optional_integer(config, "sliding_window", 4096)
    return _llama_family(name, config, max_position=131_072, num_kv_heads=8, sliding_window=(window,) * layers)


def _read_qwen2(name: str, config: Config) -> NativeArchitecture:
    return _llama_family(
        name,
        config,
        max_position=32_768,
        num_kv_heads=32,
        attention_bias=True,
        sliding_window=_qwen_windows(config),
    )


def _read_qwen3(name: str, config: Config) -> NativeArchitecture:
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
    """The fields that all of the Llama family have; the keywords are a class's defaults and variations."""
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


def _read_gpt2(name: str, config: Config) -> NativeArchitecture:
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
        activation=choice(config, "activation_function", "gelu_new", ACTIVATIONS),
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


def _read_bert(name: str, config: Config) -> NativeArchitecture:
    return _encoder(
        name,
        config,
        norm_eps=number(config, "layer_norm_eps", 1e-12),
        activation=choice(config, "hidden_act", "gelu", ACTIVATIONS),
        intermediate_size=integer(config, "intermediate_size"),
        num_token_types=integer(config, "type_vocab_size", 2),
    )


def _read_roberta(name: str, config: Config) -> NativeArchitecture:
    # The table of positions has rows for padding, and for what comes before it.
    offset = integer(config, "pad_token_id", 1, minimum=0) + 1
    bert = _read_bert(name, config)
    if bert.max_position <= offset:
        raise ValueError(
            f"config field 'max_position_embeddings' is {bert.max_position}; it must be above pad_token_id + 1 = "
            f"{offset}, the rows that are no positions"
        )
    return msgspec.structs.replace(bert, position_offset=offset, max_position=bert.max_position - offset)


def _read_distilbert(name: str, config: Config) -> NativeArchitecture:
    return _encoder(
        name,
        config,
        fields=("dim", "n_layers", "n_heads"),
        norm_eps=1e-12,
        activation=choice(config, "activation", "gelu", ACTIVATIONS),
        intermediate_size=integer(config, "hidden_dim", 3072),
        num_token_types=0,
    )


def _encoder(
    name: str,
    config: Config,
    *,
    fields: tuple[str, str, str] = ("hidden_size", "num_hidden_layers", "num_attention_heads"),
    norm_eps: float,
    activation: str,
    intermediate_size: int,
    num_token_types: int,
) -> NativeArchitecture:
    """The fields that BERT and its kin have; `fields` name the hidden size and the numbers of layers and heads."""
    if flag(config, "is_decoder", False):
        raise ValueError("config field 'is_decoder' is true; models of this family are supported as encoders (false)")
    kind = config.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise ValueError(f"config field 'position_embedding_type' is {shorten(kind)}; supported is absolute")
    hidden_size, num_layers, num_heads = (integer(config, field) for field in fields)
    head_dim = even_split(config, hidden_size, num_heads, fields[0], fields[2])
    return NativeArchitecture(
        name=name,
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        max_position=integer(config, "max_position_embeddings", 512),
        norm_eps=norm_eps,
        activation=activation,
        tie_word_embeddings=True,
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        qk_norm=False,
        sliding_window=(None,) * num_layers,
        attention_scale=(head_dim**-0.5,) * num_layers,
        rope=None,
        dtype=dtype(config),
        is_encoder=True,
        num_token_types=num_token_types,
    )


# What configurations call the same thing, the commonest name first.
_HIDDEN: Final = ("hidden_size", "n_embd", "d_model", "dim")
_POSITIONS: Final = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_sequence_length",
    "max_seq_length",
    "seq_length",
)
_ATTENTION_LAYERS: Final = ("full_attention", "sliding_attention", "chunked_attention", "attention")


def _read_other(name: str, config: Config) -> Architecture:
    """What can be told of any decoder. A model of text and images has its decoder's fields in `text_config`."""
    try:
        if flag(config, "is_encoder_decoder", False):
            raise ValueError("config field 'is_encoder_decoder' is true; only decoder-only models are supported")
        text = config.get("text_config")
        decoder = {**config, **text} if isinstance(text, dict) else config
        layer_types = decoder.get("layer_types")
        other = set(layer_types) - set(_ATTENTION_LAYERS) if isinstance(layer_types, list) else set()
        if other:
            raise ValueError(
                f"config field 'layer_types' names {shorten(sorted(map(str, other)))}; only layers of plain "
                f"attention are supported ({', '.join(_ATTENTION_LAYERS)})"
            )
        return Architecture(
            name=name,
            vocab_size=integer(decoder, "vocab_size"),
            hidden_size=_first_integer(decoder, _HIDDEN),
            max_position=_longest_context(decoder),
            dtype=dtype(decoder),
        )
    except ValueError as error:
        raise ValueError(
            f"architecture {name!r} cannot run here: {error}. Native implementations: {', '.join(SUPPORTED)}"
        ) from None


def _first_integer(config: Config, fields: tuple[str, ...]) -> int:
    for field in fields:
        if config.get(field) is not None:
            return integer(config, field)
    remedy = "it must be an integer of at least 1"
    if fields is _POSITIONS:
        remedy = "add it, unless the model knows no limit: state-space models and ALiBi are not supported"
    raise ValueError(
        f"config field '{fields[0]}' is missing (as are its other names, {', '.join(fields[1:])}); {remedy}"
    )


def _longest_context(config: Config) -> int:
    """The context length in tokens, to which YaRN may have stretched what the configuration states."""
    length = _first_integer(config, _POSITIONS)
    for rope in rope_variants(config):
        if rope.get("rope_type", rope.get("type")) == "yarn":
            original = optional_integer(rope, "original_max_position_embeddings", length) or length
            length = max(length, int(number(rope, "factor", minimum=1.0) * original))
    return length


_READERS: Final[dict[str, Callable[[str, Config], NativeArchitecture]]] = {
    "LlamaForCausalLM": _read_llama,
    "MistralForCausalLM": _read_mistral,
    "Qwen2ForCausalLM": _read_qwen2,
    "Qwen3ForCausalLM": _read_qwen3,
    "GPT2LMHeadModel": _read_gpt2,
    "BertModel": _read_bert,
    "BertForMaskedLM": _read_bert,
    "BertForPreTraining": _read_bert,
    "RobertaModel": _read_roberta,
    "RobertaForMaskedLM": _read_roberta,
    "XLMRobertaModel": _read_roberta,
    "XLMRobertaForMaskedLM": _read_roberta,
    "DistilBertModel": _read_distilbert,
    "DistilBertForMaskedLM": _read_distilbert,
}
_BY_MODEL_TYPE: Final = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "bert": "BertModel",
    "roberta": "RobertaModel",
    "xlm-roberta": "XLMRobertaModel",
    "distilbert": "DistilBertModel",
}
SUPPORTED: Final[tuple[str, ...]] = tuple(_READERS)


def _qwen_windows(config: Config) -> tuple[int | None, ...]:
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
            "config field 'layer_types' names 'sliding_attention' but there is no window: set "
            "'use_sliding_window' to true and 'sliding_window' to a number of tokens, or make every layer "
            "'full_attention'"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)
