"""The pixels of an image, as RGB, by Pillow. Image processes use this for files, clients for images of Pillow."""

import warnings
from typing import TYPE_CHECKING, Any, Final

from vllm_mp.client.images.messages import FORMATS, MAX_PIXELS, TOO_LARGE

if TYPE_CHECKING:
    from PIL import Image

_BACKGROUND: Final = (255, 255, 255)
"""What is seen through transparent pixels: white, as in vLLM."""


def open_image(data: bytes) -> "Image.Image":
    """Return the image in a file whose pixels are not decoded yet.

    Raises ValueError for a file in none of `FORMATS`, for one with more than `MAX_PIXELS` pixels, and, with the cause,
    for one that is damaged.
    """
    import io

    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of large images; the size is checked below
            image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        start = bytes(data[:16])
        raise ValueError(f"it is no image in the format {', '.join(FORMATS)}; it begins with {start!r}") from None
    except Image.DecompressionBombError:
        raise ValueError(f"it has too many pixels: {TOO_LARGE}") from None
    except MemoryError:
        raise
    except Exception as error:  # such as OSError for a header that ends early
        raise _not_decodable(error) from None
    check_size(*image.size)
    return image


def check_size(width: int, height: int) -> None:
    """Raise ValueError for an image without pixels, or with more than `MAX_PIXELS`."""
    if width < 1 or height < 1:
        raise ValueError(f"it has no pixels: {width} x {height}; leave it out")
    if width * height > MAX_PIXELS:
        raise ValueError(f"it has {width} x {height} pixels, {TOO_LARGE}")


def rgb_of(image: "Image.Image") -> "Image.Image":
    """Return the first frame of an image as RGB, turned as its EXIF orientation says, on white if it is transparent.

    Raises ValueError, with the cause, if the pixels cannot be decoded.
    """
    from PIL import Image

    check_size(*image.size)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            upright = _upright(image)
            if upright.mode == "RGB" and "transparency" not in upright.info:
                upright.load()
                return upright
            if upright.mode in ("I;16", "I;16B", "I;16L", "I;16N", "I"):
                return _of_16_bits(upright).convert("RGB")
            if upright.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in upright.info:
                layer = upright.convert("RGBA")
                whole = Image.new("RGBA", layer.size, (*_BACKGROUND, 255))
                whole.alpha_composite(layer)
                return whole.convert("RGB")
            return upright.convert("RGB")
    except MemoryError:
        raise
    except Exception as error:  # decoders raise errors of many kinds
        raise _not_decodable(error) from None


def _upright(image: "Image.Image") -> "Image.Image":
    """Return `image` as its EXIF orientation says, or as it is if its EXIF cannot be read."""
    from PIL import ImageOps

    image.load()  # raises errors of the pixels here, so that those below are errors of the EXIF
    try:
        return ImageOps.exif_transpose(image)
    except MemoryError:
        raise
    except Exception:  # of many kinds, such as SyntaxError
        return image


def _not_decodable(error: Exception) -> ValueError:
    return ValueError(f"its pixels cannot be decoded: {str(error) or repr(error):.200}; save it again")


def _of_16_bits(image: "Image.Image") -> "Image.Image":
    """Return an image of 16 bits with the upper 8 of them; one of 32 bits may also hold values of 8 bits.

    Pixels of the gray that the file calls transparent become white.
    """
    import numpy as np
    from PIL import Image

    values: Any = np.asarray(image)
    transparent = values == image.info.get("transparency")
    if image.mode != "I" or values.max() > 255:
        values = values >> 8
    values = np.where(transparent, _BACKGROUND[0], np.clip(values, 0, 255))
    return Image.fromarray(values.astype(np.uint8))
