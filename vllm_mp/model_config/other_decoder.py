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
        has_head=not name.endswith("Model"),
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
        remedy = "add it; a model without a limit (state-space models, ALiBi) is not supported"
    raise ValueError(
        f"config field '{fields[0]}' is missing (also under its other names, {', '.join(fields[1:])}); {remedy}"
    )


def _longest_context(config: Config) -> int:
    """Return the context length in tokens: the stated length, stretched if the configuration uses YaRN."""
    length = _first_integer(config, _POSITIONS)
    for rope in rope_variants(config):
        if rope.get("rope_type", rope.get("type")) == "yarn":
            original = optional_integer(rope, "original_max_position_embeddings", length) or length
            length = max(length, int(number(rope, "factor", minimum=1.0) * original))
    return length
