"""Options of the model's image processor, which the engine's configuration and each request may give."""

from typing import Any, Final

import msgspec

MAX_OPTIONS_BYTES: Final = 4096
"""Bound on the options of a request as JSON."""
_FIXED: Final = frozenset(
    {
        "backend",
        "data_format",
        "device",
        "disable_grouping",
        "images_kwargs",
        "input_data_format",
        "max_image_size",
        "merge_size",
        "patch_size",
        "return_row_col_info",
        "return_tensors",
        "temporal_patch_size",
        "text_kwargs",
        "use_fast",
        "videos_kwargs",
    }
)
"""Options that decide in which form the arrays come; the engine sets them, as the model needs them."""


def check_processor_options(name: str, options: Any) -> dict[str, Any]:
    """Return `options`, a dict of plain values, or an empty dict for None; the processor checks names and values.

    Raises TypeError or ValueError, which begins with `name`, for anything else.
    """
    if options is None:
        return {}
    if not isinstance(options, dict) or not all(isinstance(key, str) for key in options):
        raise TypeError(f"{name} must be a dict whose keys are names of the image processor's options")
    if fixed := sorted(options.keys() & _FIXED):
        raise ValueError(f"{name} must not hold {fixed[0]!r}, which the engine sets; leave it out")
    size = len(packed_processor_options(name, options))
    if size > MAX_OPTIONS_BYTES:
        raise ValueError(f"{name} must be of at most {MAX_OPTIONS_BYTES} bytes as JSON, got {size}")
    return options


def packed_processor_options(name: str, options: dict[str, Any]) -> bytes:
    """Return `options` as JSON, the same for equal options. Raises TypeError for values that JSON does not have."""
    try:
        return msgspec.json.encode(options, order="deterministic")
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise TypeError(f"{name} must hold plain values (numbers, texts, lists, dicts): {error}") from None
