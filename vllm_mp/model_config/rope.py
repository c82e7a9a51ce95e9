"""Read the rotary position parameters of a `config.json`."""

import math
from typing import Final

import msgspec

from vllm_mp.model_config.config_json import (
    Config,
    NotNativeError,
    flag,
    integer,
    number,
    optional_integer,
    optional_number,
    shorten,
)

ROPE_TYPES: Final = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position parameters, with every default resolved; a `type` uses only its own fields.

    `original_max_position` is in tokens; `attention_factor` multiplies cosines and sines (YaRN, LongRoPE).
    """

    theta: float
    type: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    """LongRoPE: the divisor of each frequency in a context of up to `original_max_position` tokens."""
    long_factor: tuple[float, ...] = ()
    """LongRoPE: the divisor of each frequency in a longer context."""
    partial_factor: float = 1.0
    """The fraction of a head that is rotated, from its first element on."""
    sections: tuple[int, ...] = ()
    """M-RoPE (Wang et al. 2024): how many pairs rotate by a token's position in time, by its row, and by its column.
    Empty: all rotate by one position. Tokens that stand for no image have three equal positions."""

    def rotary_dim(self, head_dim: int) -> int:
        """Return the number of elements of a head of `head_dim` that are rotated."""
        return int(head_dim * self.partial_factor)


def rope_variants(config: Config) -> list[Config]:
    """Return the sets of rotary parameters in a configuration: none, one for all layers, or one per kind of layer."""
    given = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(given, dict):
        return []
    return [given, *(value for value in given.values() if isinstance(value, dict))]


def read_rope(config: Config, max_position: int, head_dim: int, *, may_be_partial: bool = False) -> Rope:
    """Read `rope_parameters` (transformers v5), or `rope_scaling` and `rope_theta` (v4).

    `max_position`, in tokens, is the original context of a stretched model whose rotary parameters do not state it.
    `may_be_partial` allows a part of the head to stay unrotated. Raises ValueError, naming the field, for a value that
    is not supported, and its subclass NotNativeError for what transformers may compute.
    """
    source = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(source) or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise ValueError(f"config field '{source}' is {shorten(given)}; it must be one flat object for all layers")
    theta = None if given.get("rope_theta") else number(config, "rope_theta", 10_000.0)
    partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if not may_be_partial:
        _must_be_whole(partial)
    given = {**given, "partial_rotary_factor": 1.0 if partial is None else partial}
    # As in transformers, a value beside the rope parameters (Phi-3) takes precedence over one inside.
    original = optional_integer(config, "original_max_position_embeddings", None)
    return _parameters(given, source, theta, original, max_position, head_dim)


def _must_be_whole(partial: object) -> None:
    """Raise NotNativeError for a `partial_rotary_factor` that leaves a part of the head unrotated."""
    if partial not in (None, 1):
        raise NotNativeError(
            f"config field 'partial_rotary_factor' is {shorten(partial)}; native is 1.0 (all of the head)"
        )


def read_layer_rope(config: Config, layer_type: str, default_theta: float, max_position: int, head_dim: int) -> Rope:
    """Read the parameters of the layers of one type, as `read_rope` does for all layers.

    `rope_parameters` has an object for each type of layer.
    """
    given = config.get("rope_parameters") or {}
    of_type = (given.get(layer_type) or {}) if isinstance(given, dict) else None
    if not isinstance(of_type, dict):
        raise ValueError(
            f"config field 'rope_parameters' is {shorten(given)}; it must have an object for each type of layer"
        )
    _must_be_whole(of_type.get("partial_rotary_factor", config.get("partial_rotary_factor")))
    # As in transformers, which does not look for it in the object of a type.
    of_type = {**of_type, "truncate": given.get("truncate", True)}
    theta = None if of_type.get("rope_theta") else default_theta
    return _parameters(of_type, f"rope_parameters.{layer_type}", theta, None, max_position, head_dim)


def _parameters(
    given: Config, source: str, theta: float | None, original: int | None, max_position: int, head_dim: int
) -> Rope:
    """Return the parameters in the object `given`, which errors call `source`.

    `theta` and `original`, the original context, take precedence if they are not None.
    """
    merged: Config = {f"{source}.{key}": value for key, value in given.items()}
    theta = theta or number(merged, f"{source}.rope_theta")
    partial = number(merged, f"{source}.partial_rotary_factor", 1.0)
    rotary_dim = int(head_dim * partial)
    if partial > 1 or rotary_dim % 2 or not rotary_dim:
        raise ValueError(
            f"config field '{source}.partial_rotary_factor' is {partial}; it must be at most 1 and rotate an even "
            f"number of the {head_dim} elements of a head"
        )
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise NotNativeError(
            f"config field '{source}.rope_type' is {shorten(kind)}; native are {', '.join(ROPE_TYPES)}"
        )
    if kind in ("default", "dynamic"):
        # Dynamic NTK scaling changes frequencies only past max_position_embeddings, where each further token
        # would change keys that are already cached. The context ends there, so the default type is exact.
        return Rope(theta=theta, type=kind, partial_factor=partial)
    if kind == "linear":
        factor = number(merged, f"{source}.factor", minimum=1.0)
        return Rope(theta=theta, type=kind, factor=factor, partial_factor=partial)
    original = original or integer(merged, f"{source}.original_max_position_embeddings", max_position)
    if kind == "longrope":
        # As in transformers, the lengths of the contexts give the factor that the object does not state.
        stretched = optional_number(merged, f"{source}.factor") or max_position / original
        attention = optional_number(merged, f"{source}.attention_factor")
        if attention is None:
            attention = 1.0 if stretched <= 1 else math.sqrt(1 + math.log(stretched) / math.log(original))
        return Rope(
            theta=theta,
            type=kind,
            original_max_position=original,
            attention_factor=attention,
            short_factor=_divisors(given, source, "short_factor", rotary_dim // 2),
            long_factor=_divisors(given, source, "long_factor", rotary_dim // 2),
            partial_factor=partial,
        )
    factor = number(merged, f"{source}.factor", minimum=1.0)
    if kind == "llama3":
        low = number(merged, f"{source}.low_freq_factor")
        high = number(merged, f"{source}.high_freq_factor")
        if high <= low:
            raise ValueError(
                f"config field '{source}.high_freq_factor' is {high}; it must be above low_freq_factor, {low}"
            )
        return Rope(
            theta=theta,
            type=kind,
            factor=factor,
            original_max_position=original,
            low_freq_factor=low,
            high_freq_factor=high,
            partial_factor=partial,
        )
    return Rope(
        theta=theta,
        type=kind,
        factor=factor,
        original_max_position=original,
        beta_fast=optional_number(merged, f"{source}.beta_fast") or 32.0,
        beta_slow=optional_number(merged, f"{source}.beta_slow") or 1.0,
        truncate=flag(merged, f"{source}.truncate", True),
        attention_factor=_yarn_attention_factor(merged, source, factor),
        partial_factor=partial,
    )


def _divisors(given: Config, source: str, field: str, count: int) -> tuple[float, ...]:
    """Return a list of `count` numbers above 0."""
    values = given.get(field)
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(
            f"config field '{source}.{field}' is {shorten(values)}; it must list {count} numbers, one for "
            "each rotated pair"
        )
    return tuple(number({f"{source}.{field}[{i}]": value}, f"{source}.{field}[{i}]") for i, value in enumerate(values))


def _yarn_attention_factor(rope: Config, source: str, factor: float) -> float:
    """Return YaRN's factor of cosines and sines (Peng et al. 2023), or of DeepSeek's mscale variant."""
    given = optional_number(rope, f"{source}.attention_factor")
    if given is not None:
        return given
    mscale = optional_number(rope, f"{source}.mscale")
    mscale_all_dim = optional_number(rope, f"{source}.mscale_all_dim")
    growth = 0.1 * math.log(factor)
    if mscale and mscale_all_dim:
        return (mscale * growth + 1.0) / (mscale_all_dim * growth + 1.0)
    return growth + 1.0
