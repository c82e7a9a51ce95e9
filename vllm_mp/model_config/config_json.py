"""Read single fields of a `config.json`; every ValueError names the field, its value and what is allowed."""

import math
from typing import Any, Final

Config = dict[str, Any]
"""The contents of a `config.json`, or of an object in it."""

ACTIVATIONS: Final = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
DTYPES: Final = ("float32", "float16", "bfloat16")
_MISSING: Final = object()


class NotNativeError(ValueError):
    """Raised for a field whose value no native module computes, but transformers' own module may."""


def integer(config: Config, field: str, default: int | None = None, minimum: int = 1) -> int:
    """Return an integer of at least `minimum`; `default` None makes the field mandatory."""
    value = config.get(field, _MISSING if default is None else default)
    if value is _MISSING:
        raise ValueError(f"config field '{field}' is missing; it must be an integer of at least {minimum}")
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"config field '{field}' is {shorten(value)}; it must be an integer of at least {minimum}")
    return value


def optional_integer(config: Config, field: str, default: int | None) -> int | None:
    """Return what `integer` does; None if the field is null, or absent without a default."""
    return None if config.get(field, default) is None else integer(config, field, default)


def number(config: Config, field: str, default: float | None = None, minimum: float = 0.0) -> float:
    """Return a finite number above 0 and of at least `minimum`; `default` None makes the field mandatory."""
    value = config.get(field, _MISSING if default is None else default)
    allowed = f"a finite number {'above 0' if minimum == 0 else f'of at least {minimum}'}"
    if value is _MISSING:
        raise ValueError(f"config field '{field}' is missing; it must be {allowed}")
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not math.isfinite(value)
        or value <= 0
        or value < minimum
    ):
        raise ValueError(f"config field '{field}' is {shorten(value)}; it must be {allowed}")
    return float(value)


def optional_number(config: Config, field: str) -> float | None:
    """Return what `number` does; None if the field is null or absent."""
    return None if config.get(field) is None else number(config, field)


def flag(config: Config, field: str, default: bool) -> bool:
    """Return a boolean; `default` if the field is absent."""
    value = config.get(field, default)
    if not isinstance(value, bool):
        raise ValueError(f"config field '{field}' is {shorten(value)}; it must be true or false")
    return value


def choice(config: Config, field: str, default: str, allowed: tuple[str, ...]) -> str:
    """Return one of the `allowed` strings; `default` if the field is absent."""
    value = config.get(field, default)
    if value not in allowed:
        raise ValueError(f"config field '{field}' is {shorten(value)}; supported are {', '.join(allowed)}")
    return str(value)


def with_own_names(config: Config, own_names: dict[str, str]) -> Config:
    """Return a configuration whose fields have the names that their family reads, given by their other names.

    As in transformers, a field with the other name takes precedence.
    """
    found = {own: config[other] for other, own in own_names.items() if config.get(other) is not None}
    return {**config, **found}


def activation(config: Config, field: str, default: str) -> str:
    """Return the name of an activation that native modules have; raises NotNativeError for another name."""
    value = config.get(field, default)
    if isinstance(value, str) and value not in ACTIVATIONS:
        raise NotNativeError(f"config field '{field}' is {shorten(value)}; native are {', '.join(ACTIVATIONS)}")
    return choice(config, field, default, ACTIVATIONS)


def dtype(config: Config) -> str | None:
    """Return the dtype of the weights, from `dtype` (v5) or `torch_dtype` (v4); None if neither is set."""
    field = "dtype" if config.get("dtype") is not None else "torch_dtype"
    value = config.get(field)
    if value is None:
        return None
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"config field '{field}' is {value!r}; supported are {', '.join(DTYPES)}")
    return name


def shorten(value: object) -> str:
    """Return `value` as text of at most 80 characters, for an error."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def even_split(
    config: Config,
    hidden_size: int,
    num_heads: int,
    size_field: str = "hidden_size",
    heads_field: str = "num_attention_heads",
) -> int:
    """Return the head size, `hidden_size / num_heads`; `size_field` and `heads_field` name the two in the error."""
    if hidden_size % num_heads:
        raise ValueError(
            f"config field '{size_field}' is {hidden_size}; it must be a multiple of {heads_field} ({num_heads})"
        )
    return hidden_size // num_heads
