"""What a client and its image processes tell each other, through pipes: frames of a length and a msgpack struct."""

import struct
from typing import Final

import msgspec

from vllm_mp.requests.images import ImageArray

HEADER: Final = struct.Struct("<Q")
"""The length of a frame in bytes."""
MAX_FRAME_BYTES: Final = 2**29
MAX_PIXELS: Final = 2**26
"""Bound on the pixels of an image, width times height: 200 MB as RGB."""
MAX_FILE_BYTES: Final = 2**26
"""Bound on an image as a file: PNG, JPEG and so on."""
FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""The formats of files that are decoded, as Pillow names them. Others are rare, or their decoders start programs."""
TOO_LARGE: Final = f"the limit is {MAX_PIXELS} pixels (width times height); make the image smaller"


class ProcessorSettings(msgspec.Struct, array_like=True, frozen=True):
    """The first frame to an image process: the image processor of the model."""

    processor: str
    """The name of its class in transformers, which runs without torch."""
    settings: bytes
    """Its settings as a JSON object."""


class ImageJob(msgspec.Struct, array_like=True, frozen=True):
    """A frame to an image process: an image to process."""

    data: bytes
    """A file in one of `FORMATS`, or with a `width` the pixels [height, width, 3] of uint8."""
    options: bytes
    """Options of the processor that replace its settings, as a JSON object."""
    width: int = 0
    height: int = 0


class ImageResult(msgspec.Struct, array_like=True, frozen=True):
    """A frame from an image process: the answer to a job."""

    digest: bytes = b""
    """As in `ProcessedImage`."""
    arrays: list[ImageArray] = []
    rows: int = 0
    columns: int = 0
    """Rows and columns of tiles into which the image was split, beside the whole image; 0: it was not."""
    error: str = ""
    """What is wrong with the image or the options, with the remedy; empty: nothing."""
