"""The images of a request: which tokens of its prompt stand for which embeddings.

The tokens of an image may attend to one another (Gemma 3). Then a step computes all of them or none, so a chunk of a
prompt ends at no token within an image. A cached prefix may end there: its keys and values were computed by a step with
the whole image, which the hashes of its blocks cover. The tokens that are left see the cached ones and one another.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_mp.core.images.image_store import StoredImage
from vllm_mp.requests.images import PlacedImage


class ImagePart(NamedTuple):
    """Consecutive embeddings of an image, in consecutive tokens of a prompt."""

    position: int
    """Index of the first token."""
    image: StoredImage
    offset: int
    """Index of the first embedding in the image."""
    num_tokens: int


class RequestImages:
    """The images of a prompt, and the runs of placeholder tokens that stand for their embeddings."""

    def __init__(self, placed: Sequence[PlacedImage], images: Sequence[StoredImage], num_prompt_tokens: int) -> None:
        """`images` are those that `placed` names.

        Raises ValueError if the spans are not in order or not in the prompt, or do not fit the images' embeddings.
        """
        parts: list[ImagePart] = []
        end = 0
        for each, image in zip(placed, images, strict=True):
            if image.error:
                raise ValueError(image.error)
            offset = 0
            if image.shape.columns and len(each.spans) != 1:
                raise ValueError(
                    f"an image of this model must stand at consecutive tokens of the prompt, got {len(each.spans)} runs"
                )
            for first, count in each.spans:
                if first < end or first + count > num_prompt_tokens:
                    raise ValueError(
                        "images must stand at tokens of the prompt, one after another; got "
                        f"{count} tokens from {first} on in a prompt of {num_prompt_tokens}, after token {end - 1}"
                    )
                if image.shape.is_whole and count != image.shape.tile_tokens:
                    raise ValueError(
                        f"a tile of an image of this model must stand at {image.shape.tile_tokens} consecutive tokens, "
                        f"got a span of {count}"
                    )
                parts.append(ImagePart(first, image, offset, count))
                end, offset = first + count, offset + count
            if offset != image.num_tokens:
                raise ValueError(
                    f"an image has {image.num_tokens} embeddings, but its places in the prompt have {offset} tokens"
                )
        self.are_whole = any(image.shape.is_whole for image in images)
        """True: the tokens of a part attend to one another, and a step computes all of them or none."""
        self._parts = parts
        self._ends = np.array([part.position + part.num_tokens for part in parts], np.int64)
        self.images = list({id(image): image for image in images}.values())
        """The images, each once."""

    def parts(self, first: int, last: int) -> Iterator[ImagePart]:
        """Yield what the tokens [first, last) have of images."""
        for part in self._parts[int(np.searchsorted(self._ends, first, "right")) :]:
            begin, end = max(first, part.position), min(last, part.position + part.num_tokens)
            if begin >= end:
                return
            yield ImagePart(begin, part.image, part.offset + begin - part.position, end - begin)

    def rope_positions(self, num_tokens: int) -> npt.NDArray[np.int32]:
        """Return the positions in time, rows and columns of the first `num_tokens` tokens: [3, num_tokens].

        The tokens of an image have a position for each of its rows and columns; the token behind it follows on the
        largest of them.
        """
        positions = np.empty((3, num_tokens), np.int32)
        end, shift = 0, 0
        for part in self._parts:
            first, columns = part.position, part.image.shape.columns
            positions[:, end:first] = np.arange(end, first) + shift
            end = first + part.num_tokens
            rows, columns_of = np.divmod(np.arange(part.num_tokens), columns)
            positions[:, first:end] = first + shift
            positions[1, first:end] += rows.astype(np.int32)
            positions[2, first:end] += columns_of.astype(np.int32)
            shift += max(part.num_tokens // columns, columns) - part.num_tokens
        positions[:, end:] = np.arange(end, num_tokens) + shift
        return positions

    def missing_tile(self, first: int, last: int) -> tuple[StoredImage, int] | None:
        """Return the first tile that the tokens [first, last) need and that is not encoded, with its image.

        Return None if none is missing.
        """
        for part in self.parts(first, last):
            tile = part.image.missing_tile(part.offset, part.offset + part.num_tokens)
            if tile is not None:
                return part.image, tile
        return None

    def divided_by(self, position: int) -> tuple[int, int] | None:
        """Return (first token, end) of the part that begins before `position` and ends after it; None if none does."""
        index = int(np.searchsorted(self._ends, position, "right"))
        if index == len(self._parts) or self._parts[index].position >= position:
            return None
        return self._parts[index].position, int(self._ends[index])

    def overlaps(self, first: int, last: int) -> bool:
        """Return whether any of the tokens [first, last) stands for an embedding."""
        return next(self.parts(first, last), None) is not None

    def content(self, first: int, last: int) -> bytes:
        """Return what the tokens [first, last) have of images, for their hash; empty if they have nothing."""
        return b"".join(
            part.image.keys(part.offset, part.offset + part.num_tokens)
            + struct.pack("<3q", part.position - first, part.offset, part.num_tokens)
            for part in self.parts(first, last)
        )
