"""Read the `config.json` of a decoder that has no native module here and runs as transformers' own."""

from typing import Final

from vllm_mp.model_config.architecture import Architecture
from vllm_mp.model_config.config_json import Config, dtype, flag, integer, number, optional_integer, shorten
from vllm_mp.model_config.rope import rope_variants

# The names that configurations give to the same field, the most common first.
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
_STATE_FIELDS: Final = ("state_size", "ssm_cfg", "d_state", "attention_hidden_size")
"""Fields of models that keep a state instead of keys and values (Mamba, RWKV)."""
OWN_ATTENTION: Final = "its attention in transformers is code of its own, which cannot be replaced by paged attention"
_OWN_ATTENTION: Final = ("falcon", "gptj", "codegen", "gpt_neo", "xglm", "openai-gpt")
"""The `model_type` of decoders whose attention in transformers is code of their own."""
_ATTENTION_LAYERS: Final = ("full_attention", "sliding_attention", "chunked_attention", "attention")


def read_other_decoder(name: str, config: Config) -> Architecture:
    """Read the fields that every decoder's configuration has.

    A model of text and images has its decoder's fields in `text_config`. Raises ValueError, naming the field, for
    an encoder-decoder, for layers other than attention, and for sizes that are missing or ill-typed.
    """
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
        has_head=not name.endswith("Model") or name.endswith("HeadModel"),
        vocab_size=integer(decoder, "vocab_size"),
        hidden_size=_first_integer(decoder, _HIDDEN),
        max_position=_longest_context(decoder),
        dtype=dtype(decoder),
    )


def _first_integer(config: Config, fields: tuple[str, ...]) -> int:
    """Return the value of the first of `fields` that the configuration sets. Raises ValueError if it sets none."""
    for field in fields:
        if config.get(field) is not None:
            return integer(config, field)
    remedy = "it must be an integer of at least 1"
    if fields is _POSITIONS:
        if cause := why_not_paged(config):
            raise ValueError(cause)
        remedy = "add it, the longest context in tokens"
    raise ValueError(
        f"config field '{fields[0]}' is missing (also under its other names, {', '.join(fields[1:])}); {remedy}"
    )


def why_not_paged(config: Config) -> str | None:
    """Return why a decoder of this configuration cannot use paged attention; None if nothing in `config` says so."""
    of_attention = config.get("attn_config")
    has_alibi = config.get("alibi") or (isinstance(of_attention, dict) and of_attention.get("alibi"))
    if has_alibi or config.get("model_type") == "bloom":
        return "its attention adds biases by distance (ALiBi), which paged attention does not compute"
    if config.get("model_type") in _OWN_ATTENTION:
        return OWN_ATTENTION
    if any(field in config for field in _STATE_FIELDS):
        return "it keeps a state in addition to keys and values (a state-space or recurrent model)"
    return None


def _longest_context(config: Config) -> int:
    """Return the context length in tokens: the stated length, stretched by linear scaling of all layers, or by YaRN."""
    length = _first_integer(config, _POSITIONS)
    states_stretched = str(config.get("model_type")).startswith("gemma3")
    for place, rope in enumerate(rope_variants(config)):
        kind = rope.get("rope_type", rope.get("type"))
        if kind == "yarn":
            original = optional_integer(rope, "original_max_position_embeddings", length) or length
            length = max(length, int(number(rope, "factor", minimum=1.0) * original))
        elif kind == "linear" and place == 0 and not states_stretched:  # later ones are of one type of layer
            length = int(number(rope, "factor", minimum=1.0) * length)
    return length
