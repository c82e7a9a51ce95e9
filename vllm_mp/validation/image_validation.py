"""Checks of the arrays of an image, before anything is computed with them."""

import math
from typing import Final, NamedTuple

import numpy as np

from vllm_mp.model_config.images import ImageConfig
from vllm_mp.requests.images import IMAGE_DTYPES, ImageArray, ProcessedImage

_REMEDY: Final = "send what the model's processor makes of one image"
_PIXELS, _MASK, _GRID = "pixel_values", "pixel_attention_mask", "image_grid_thw"


class ImageShape(NamedTuple):
    """What an image becomes."""

    num_tiles: int
    tile_tokens: int
    """Number of embeddings of a tile."""
    columns: int = 0
    """Number of embeddings in a row of the image, whose rows and columns are positions of the tokens; 0: they are
    not."""
    is_whole: bool = False
    """True: the tokens of a tile attend to one another, so a step computes all of them or none."""


def image_shape(image: ProcessedImage, config: ImageConfig) -> ImageShape:
    """Return what an image becomes.

    Raises ValueError, naming the array, if the arrays are not those that the model's encoder takes. Their values are
    not looked at, which would take time for each tile.
    """
    arrays = {array.name: array for array in image.arrays}
    allowed = {_PIXELS, _MASK} if config.has_masks else {_PIXELS}
    if config.merge_size:
        allowed = {_PIXELS, _GRID}
    if _PIXELS not in arrays or len(arrays) != len(image.arrays) or not arrays.keys() <= allowed:
        names = ", ".join(repr(array.name[:50]) for array in image.arrays) or "none"
        raise ValueError(f"an image must have the arrays {', '.join(sorted(allowed))}, got {names}; {_REMEDY}")
    if config.merge_size:
        return _grid_shape(arrays, config)
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
    return ImageShape(num_tiles, config.tile_tokens, is_whole=config.attends_both_ways)


def _grid_shape(arrays: dict[str, ImageArray], config: ImageConfig) -> ImageShape:
    """Return the shape of an image that is a grid of patches. Raises ValueError as `image_shape` does."""
    pixels, grid = arrays[_PIXELS], arrays.get(_GRID)
    if grid is None or grid.dtype != "int64" or grid.shape != [1, 3]:
        raise ValueError(f"an image must have image_grid_thw, int64 [1, 3]; {_REMEDY}")
    _check_length(grid)
    frames, rows, columns = np.frombuffer(grid.data, np.int64).tolist()
    num_values, merge = 3 * config.patch_size**2, config.merge_size
    if frames != 1 or rows < merge or columns < merge or rows % merge or columns % merge:
        raise ValueError(
            f"image_grid_thw must be 1 frame of rows and columns that {merge} divides, got {[frames, rows, columns]}; "
            f"{_REMEDY}"
        )
    if pixels.dtype != "float32" or pixels.shape != [rows * columns, num_values]:
        raise _wrong(pixels, f"float32 [{rows * columns}, {num_values}]")
    _check_length(pixels)
    return ImageShape(1, rows * columns // merge**2, columns // merge)


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
