"""Read the rotary position parameters of a `config.json`."""

import math
from typing import Final

import msgspec

from vllm_mp.model_config.config_json import Config, flag, integer, number, optional_integer, optional_number, shorten

ROPE_TYPES: Final = ("default", "linear", "dynamic", "llama3", "yarn")


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position parameters, with every default resolved; a `type` uses only its own fields.

    `original_max_position` is in tokens; `attention_factor` multiplies cosines and sines (YaRN).
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


def rope_variants(config: Config) -> list[Config]:
    """Return the sets of rotary parameters in a configuration: none, one for all layers, or one per kind of layer."""
    given = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(given, dict):
        return []
    return [given, *(value for value in given.values() if isinstance(value, dict))]


def read_rope(config: Config, max_position: int) -> Rope:
    """Read `rope_parameters` (transformers v5), or `rope_scaling` and `rope_theta` (v4).

    `max_position`, in tokens, is the original context of a stretched model whose rotary parameters do not state it.
    Raises ValueError, naming the field, for a type or a value that is not supported.
    """
    source = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(source) or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise ValueError(f"config field '{source}' is {shorten(given)}; it must be one flat object for all layers")
    merged: Config = {f"{source}.{key}": value for key, value in given.items()}
    theta_key = f"{source}.rope_theta"
    theta = number(merged, theta_key) if given.get("rope_theta") else number(config, "rope_theta", 10_000.0)
    partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise ValueError(
            f"config field 'partial_rotary_factor' is {partial!r}; only 1.0 (all of the head) is supported"
        )
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ValueError(
            f"config field '{source}.rope_type' is {kind!r}; supported are {', '.join(ROPE_TYPES)}"
            + (" (longrope changes frequencies with the length of a sequence)" if kind in ("longrope", "su") else "")
        )
    if kind in ("default", "dynamic"):
        # Dynamic NTK scaling changes frequencies only past max_position_embeddings, where each further token
        # would change keys that are already cached. The context ends there, so the default type is exact.
        return Rope(theta=theta, type=kind)
    factor = number(merged, f"{source}.factor", minimum=1.0)
    if kind == "linear":
        return Rope(theta=theta, type=kind, factor=factor)
    # As in transformers, a value beside the rope parameters (Phi-3) takes precedence over one inside.
    original = optional_integer(config, "original_max_position_embeddings", None)
    original = original or integer(merged, f"{source}.original_max_position_embeddings", max_position)
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
    )


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
