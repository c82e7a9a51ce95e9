"""The arguments of a worker's method as text: plain data, which no decoder turns into code."""

import json
import reprlib
from typing import Any

import msgspec

_MAX_CHARACTERS = 2**16


def pack_arguments(args: Any, kwargs: Any) -> str:
    """Return positional and keyword arguments as JSON.

    Raises TypeError unless they are a sequence and a dict, or None, of plain data: None, bools, numbers, strings, lists
    and dicts. Raises ValueError for numbers that are not finite and for arguments of more than 64 KiB.
    """
    if not isinstance(args, list | tuple) or not isinstance(kwargs, dict | None):
        raise TypeError(f"args must be a tuple and kwargs a dict, got {reprlib.repr(args)} and {reprlib.repr(kwargs)}")
    try:
        packed = json.dumps([list(args), kwargs or {}], allow_nan=False)
    except (TypeError, RecursionError) as error:
        raise TypeError(
            f"args and kwargs must be plain data (None, bools, numbers, strings, lists, dicts): {error}"
        ) from error
    _check_size(packed)
    return packed


def unpack_arguments(packed: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return what `pack_arguments` was given. Raises ValueError for anything that it does not return."""
    if not isinstance(packed, str):
        raise ValueError(f"the arguments must be JSON, got {reprlib.repr(packed)}")
    _check_size(packed)
    try:
        args, kwargs = msgspec.json.decode(packed, type=tuple[list[Any], dict[str, Any]])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"the arguments must be JSON, a list and an object in a list: {error}") from error
    return args, kwargs


def _check_size(packed: str) -> None:
    if len(packed) > _MAX_CHARACTERS:
        raise ValueError(
            f"the arguments are too large: {len(packed)} characters of JSON; shorten them to {_MAX_CHARACTERS}"
        )
