"""Checks of the arrays of an image, before anything is computed with them."""

import math
from typing import Final

import numpy as np

from vllm_mp.model_config.images import ImageConfig
from vllm_mp.requests.images import IMAGE_DTYPES, ImageArray, ProcessedImage

_REMEDY: Final = "send what the model's processor makes of one image"
_PIXELS, _MASK = "pixel_values", "pixel_attention_mask"


def count_tiles(image: ProcessedImage, config: ImageConfig) -> int:
    """Return the number of tiles of an image.

    Raises ValueError, naming the array, if the arrays are not those that the model's encoder takes. Their values are
    not looked at, which would take time for each tile.
    """
    arrays = {array.name: array for array in image.arrays}
    allowed = {_PIXELS, _MASK} if config.has_many_tiles else {_PIXELS}
    if _PIXELS not in arrays or len(arrays) != len(image.arrays) or not arrays.keys() <= allowed:
        names = ", ".join(repr(array.name[:50]) for array in image.arrays) or "none"
        raise ValueError(f"an image must have the arrays {', '.join(sorted(allowed))}, got {names}; {_REMEDY}")
    size = config.tile_size
    pixels = arrays[_PIXELS]
    num_tiles = math.prod(pixels.shape[:-3])
    if pixels.dtype != "float32" or pixels.shape[-3:] != [3, size, size] or num_tiles < 1 or len(pixels.shape) > 5:
        raise _wrong(pixels, f"float32 [tiles, 3, {size}, {size}]")
    if num_tiles > 1 and not config.has_many_tiles:
        raise ValueError(f"pixel_values must have 1 tile, got {num_tiles}; {_REMEDY}")
    _check_length(pixels)
    if (mask := arrays.get(_MASK)) is not None:
        if mask.dtype not in ("int64", "bool") or mask.shape[-2:] != [size, size]:
            raise _wrong(mask, f"int64 or bool [tiles, {size}, {size}]")
        _check_length(mask)
        begins = np.frombuffer(mask.data, mask.dtype)[:: size * size]
        if math.prod(mask.shape[:-2]) != num_tiles or not begins.all():
            raise ValueError(f"pixel_attention_mask must begin with an image in each of {num_tiles} tiles; {_REMEDY}")
    return num_tiles


def _check_length(array: ImageArray) -> None:
    """Raise ValueError if the number of values is not that of the shape."""
    width = IMAGE_DTYPES.get(array.dtype, 0)
    if len(array.data) != width * math.prod(array.shape):
        raise ValueError(
            f"{array.name} must have {math.prod(array.shape)} values of {array.dtype}, got {len(array.data)} bytes"
        )


def _wrong(array: ImageArray, expected: str) -> ValueError:
    return ValueError(
        f"{array.name} must be {expected}, as the model's configuration has it, got {array.dtype} {array.shape}; "
        f"{_REMEDY}"
    )
