"""Rotary scaling in a GGUF file: metadata and factors in tensors become the fields of `rope_parameters`."""

import math
from typing import Any, Final

from vllm_mp.model_store.gguf_file.fields import GgufFields

_ROPE_FREQS: Final = "rope_freqs.weight"
"""The tensor that has the factors of Llama 3's rotary scaling."""
_LONG_FACTORS: Final = "rope_factors_long.weight"
_SHORT_FACTORS: Final = "rope_factors_short.weight"
ROPE_FACTORS: Final = (_ROPE_FREQS, _LONG_FACTORS, _SHORT_FACTORS)
"""The tensors that belong to the configuration: factors of rotary scaling."""
_YARN: Final = {"yarn_attn_factor": "attention_factor", "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
"""What configurations call the fields that only some files with YaRN have."""


def rope_scaling(fields: GgufFields, theta: float, head_dim: int, *, is_longrope: bool) -> dict[str, Any]:
    """Return the scaling with the base `theta`, of heads of `head_dim`; a part may be rotated if `is_longrope`.

    Raises ValueError, naming the field, for scaling that is not supported.
    """
    rotated = fields.integer("rope.dimension_count", head_dim)
    if is_longrope:
        return {"partial_rotary_factor": rotated / head_dim, **_longrope(fields, rotated)}
    if rotated != head_dim:
        raise fields.error("rope.dimension_count", rotated, f"all {head_dim} elements of a head must be rotated")
    if _ROPE_FREQS in fields.file.tensors:
        return _llama3(fields, theta, head_dim // 2)
    # As llama.cpp does: older files have another key, a file without a type means linear, and 0 means no scaling.
    key = "rope.scaling.factor"
    key = "rope.scale_linear" if fields.value(key, None) is None else key
    kind = fields.value("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise fields.error("rope.scaling.type", kind, "supported are none, linear, yarn and factors in a tensor")
    if kind == "none" or fields.value(key, 0) == 0:
        return {"rope_type": "default"}
    scaling: dict[str, Any] = {"rope_type": kind, "factor": fields.number(key, minimum=1.0)}
    if kind == "linear":
        return scaling
    if fields.value("rope.scaling.original_context_length", None) is not None:
        scaling["original_max_position_embeddings"] = fields.integer("rope.scaling.original_context_length")
    for stated, name in _YARN.items():
        if fields.value(f"rope.scaling.{stated}", None) is not None:
            scaling[name] = fields.number(f"rope.scaling.{stated}")
    mixed = fields.value("rope.scaling.yarn_ext_factor", 1)
    if mixed != 1:
        raise fields.error("rope.scaling.yarn_ext_factor", mixed, "only 1 is supported")
    return scaling


def _llama3(fields: GgufFields, theta: float, count: int) -> dict[str, Any]:
    """Return the parameters of Llama 3.1's scaling that give the factors in the file."""
    factors = fields.factors(_ROPE_FREQS, count)
    factor, low, high, original = max(factors), 1.0, 4.0, 8192
    for pair, found in enumerate(factors):
        turns = original / (2 * math.pi * theta ** (pair / count))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        expected = 1 / ((1 - smooth) / factor + smooth) if factor > 0 else math.nan
        if not abs(found - expected) <= 1e-3 * expected + 1e-8:  # this form refuses NaN too
            rule = "its rotary factors do not follow Llama 3's rule, the only supported rule"
            raise fields.error(f"{_ROPE_FREQS}[{pair}]", found, rule)
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _longrope(fields: GgufFields, rotated: int) -> dict[str, Any]:
    if _LONG_FACTORS not in fields.file.tensors and _SHORT_FACTORS not in fields.file.tensors:
        return {"rope_type": "default"}
    names = {"long_factor": _LONG_FACTORS, "short_factor": _SHORT_FACTORS}
    factors = {key: fields.factors(name, rotated // 2) for key, name in names.items()}
    for name, values in zip(names.values(), factors.values(), strict=True):
        if not all(0 < value < math.inf for value in values):
            raise fields.error(name, values, "it must have finite numbers above 0")
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": fields.integer("rope.scaling.original_context_length"),
        **factors,
    }
    if fields.value("rope.scaling.attn_factor", None) is not None:
        scaling["attention_factor"] = fields.number("rope.scaling.attn_factor")
    return scaling
