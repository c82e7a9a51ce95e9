"""The images of a prompt as callers give them, and the jobs for image processes that they become."""

import re
import sys
from typing import Any, Final, NamedTuple

import numpy as np

from vllm_mp.client.images.messages import MAX_FILE_BYTES, ImageJob
from vllm_mp.client.images.pixels import check_size, rgb_of

_FORMS: Final = "an image of Pillow, a NumPy array [height, width, 3] of uint8, or the bytes of a file"
_NAMED: Final = re.compile(r"multi_modal_data\['image'\]\[(\d+)\]")
"""How `_name` names an image."""


MAX_NAME_CHARACTERS: Final = 1024


class GivenImage(NamedTuple):
    """An image of a prompt as its caller gave it."""

    value: Any
    """An image in one of the forms that can be decoded; None: the image that was last given under `name`."""
    name: str | None = None


class ImageSourceError(ValueError):
    """An image of a conversation cannot be had; the message says why."""

    def __init__(self, number: int, reason: str) -> None:
        """`number` is the position of the image among those of the conversation."""
        super().__init__(reason)
        self.number = number

    def __reduce__(self) -> Any:  # so that it can be pickled
        return type(self), (self.number, str(self)), self.__dict__


def given_images(data: Any, uuids: Any) -> list[GivenImage]:
    """Return the images in `multi_modal_data`, a dict with an image or a list of images under "image".

    `uuids` are the prompt's `multi_modal_uuids`: names of the images, by which later prompts may have them. Raises
    TypeError, ValueError or NotImplementedError for other media, other forms, and None without a name.
    """
    images, names = _images_in(data), _names_in(uuids)
    if names and not images:
        images = [None] * len(names)
    if names and len(names) != len(images):
        raise ValueError(
            f"multi_modal_uuids['image'] has {len(names)} entries for {len(images)} images; give one for each, or None"
        )
    given = list(map(GivenImage, images, names or [None] * len(images)))
    for number, image in enumerate(given):
        if image.value is not None:
            _check_form(image.value, _name(number))
        elif image.name is None:
            raise TypeError(f"{_name(number)} is None, and has no name in multi_modal_uuids; give {_FORMS}")
    return given


def _images_in(data: Any) -> list[Any]:
    if data is None:
        return []
    if not isinstance(data, dict):
        raise TypeError(f"multi_modal_data must be a dict such as {{'image': image}}, got {type(data).__name__}")
    for name, value in data.items():
        is_empty = value is None or (isinstance(value, list | tuple) and not value)
        if name != "image" and not is_empty:
            raise NotImplementedError(f"multi_modal_data[{name!r:.100}] is not served: prompts may have images only")
    images = data.get("image")
    if images is None:
        return []
    return list(images) if isinstance(images, list | tuple) else [images]


def _names_in(uuids: Any) -> list[str | None]:
    if uuids is None:
        return []
    if not isinstance(uuids, dict) or not uuids.keys() <= {"image"}:
        raise TypeError("multi_modal_uuids must be a dict with a list of str or None under 'image'")
    names = uuids.get("image")
    names = [names] if isinstance(names, str) else [] if names is None else names
    if not isinstance(names, list | tuple):
        raise TypeError(f"multi_modal_uuids['image'] must be a list of str or None, got {names!r:.100}")
    for number, name in enumerate(names):
        check_image_name(f"multi_modal_uuids['image'][{number}]", name)
    return list(names)


def check_image_name(field: str, name: Any) -> None:
    """Raise TypeError or ValueError, which names the `field`, unless `name` is None or can name an image."""
    if name is None:
        return
    if not isinstance(name, str):
        raise TypeError(f"{field} must be a str or None, got {name!r:.100}")
    if not 0 < len(name) <= MAX_NAME_CHARACTERS:
        raise ValueError(f"{field} must have 1 to {MAX_NAME_CHARACTERS} characters, got {len(name)}; give another name")


def image_job(image: Any, number: int, options: bytes) -> ImageJob:
    """Return the job for an image; the caller's thread copies its pixels, and for an image of Pillow decodes them.

    Raises TypeError or ValueError, which names the image by its `number`, if it cannot be decoded.
    """
    name = _name(number)
    try:
        if isinstance(image, bytes | bytearray | memoryview):
            return ImageJob(bytes(image), options)
        if isinstance(image, np.ndarray):
            height, width, channels = image.shape
            if channels == 3:
                return ImageJob(image.tobytes(), options, width, height)
            image = _pillow().fromarray(image)
        pixels = rgb_of(image)
        return ImageJob(pixels.tobytes(), options, *pixels.size)
    except MemoryError:
        raise ValueError(f"{name} cannot be used: it needs too much memory; make it smaller") from None
    except ValueError as error:
        raise ValueError(f"{name} cannot be used: {error}") from None


def image_number(message: str) -> int | None:
    """Return the number of the image that an error's `message` is about, which it then begins with; else None."""
    found = _NAMED.match(message)
    return None if found is None else int(found[1])


def renamed(message: str, name: str) -> str:
    """Return a message for which `image_number` is not None, with `name` for the image."""
    return _NAMED.sub(lambda _: name, message, count=1)


def _name(number: int) -> str:
    return f"multi_modal_data['image'][{number}]"


def _check_form(image: Any, name: str) -> None:
    """Raise TypeError or ValueError, with the remedy, for an object that is no image, or too large."""
    if isinstance(image, bytes | bytearray | memoryview):
        if not 0 < len(image) <= MAX_FILE_BYTES:
            raise ValueError(f"{name} must be a file of 1 to {MAX_FILE_BYTES} bytes, got {len(image)}")
    elif isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] not in (3, 4):
            raise ValueError(
                f"{name} must be an array [height, width, 3] of uint8, got {list(image.shape)} of {image.dtype}; "
                "transpose or convert it"
            )
        _check_size(name, image.shape[1], image.shape[0])
    elif isinstance(image, str):
        raise TypeError(f"{name} is a str; open the file, and give {_FORMS}")
    elif is_pillow_image(image):
        _check_size(name, *image.size)
    else:
        raise TypeError(f"{name} must be {_FORMS}, got {type(image).__name__}")


def _check_size(name: str, width: int, height: int) -> None:
    try:
        check_size(width, height)
    except ValueError as error:
        raise ValueError(f"{name} cannot be used: {error}") from None


def is_pillow_image(value: Any) -> bool:
    """Return whether `value` is an image of Pillow, without importing it."""
    module: Any = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def _pillow() -> Any:
    from PIL import Image

    return Image
