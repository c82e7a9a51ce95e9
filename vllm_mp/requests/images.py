"""Images of a prompt, in the forms that the wire carries."""

from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_IMAGE_BYTES: Final = 56 * 2**20
"""Bound on the arrays of an image. The rest of a message of the maximum size is left for its other fields."""
MAX_IMAGES: Final = 256
"""Bound on the images of a prompt; `limit_mm_per_prompt` may be lower."""
MAX_IMAGE_SPANS: Final = 1024
"""Bound on the spans of placeholder tokens of an image."""
IMAGE_DIGEST_BYTES: Final = 32
IMAGE_DTYPES: Final = {"float32": 4, "float16": 2, "uint8": 1, "int64": 8, "bool": 1}
"""The dtypes of an image's arrays, with the bytes of a value."""

ImageDigest = Annotated[bytes, msgspec.Meta(min_length=IMAGE_DIGEST_BYTES, max_length=IMAGE_DIGEST_BYTES)]
"""SHA-256 over the pixels of an image and all options of the processor that made its arrays."""


class ImageArray(msgspec.Struct, array_like=True, frozen=True):
    """An array that a model's image processor made, such as its pixels."""

    name: Annotated[str, msgspec.Meta(max_length=64)]
    """The name that the processor gives it: "pixel_values", "pixel_attention_mask", "image_grid_thw"."""
    dtype: Annotated[str, msgspec.Meta(max_length=16)]
    """A name in `IMAGE_DTYPES`."""
    shape: Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]], msgspec.Meta(max_length=8)]
    data: Annotated[bytes, msgspec.Meta(max_length=MAX_IMAGE_BYTES)]
    """Its values in C order, little-endian."""

    @classmethod
    def of(cls, name: str, array: "npt.NDArray[Any]") -> "ImageArray":
        """Return `array` as the wire carries it."""
        return cls(name, array.dtype.name, list(array.shape), array.tobytes())


class ProcessedImage(msgspec.Struct, array_like=True, frozen=True):
    """An image as the model's image processor made it; each image is processed by itself."""

    digest: ImageDigest
    arrays: Annotated[list[ImageArray], msgspec.Meta(max_length=8)]


class PlacedImage(msgspec.Struct, array_like=True, frozen=True):
    """Where an image stands in a prompt."""

    digest: ImageDigest
    spans: Annotated[
        list[tuple[Annotated[int, msgspec.Meta(ge=0, lt=2**31)], Annotated[int, msgspec.Meta(ge=1, lt=2**31)]]],
        msgspec.Meta(min_length=1, max_length=MAX_IMAGE_SPANS),
    ]
    """(index of the first token, number of tokens) of each run of placeholder tokens in the prompt, in order. The
    image's embeddings take the places of these tokens, in order. The tokens between the runs are text."""
