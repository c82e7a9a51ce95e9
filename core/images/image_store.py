"""The images that clients have sent, with their embeddings once these are computed."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

from vllm_mp.requests.images import ImageArray, ImageDigest, PlacedImage, ProcessedImage
from vllm_mp.validation.image_validation import ImageShape

if TYPE_CHECKING:
    from torch import Tensor

_FRESH_BYTES: Final = 2**30
"""Images of so many bytes are kept in any case, so that those of a request are there when the request arrives."""
_NAME_BYTES: Final = 2**10
"""Bytes that an image takes beside its arrays and embeddings."""


class StoredImage:
    """An image that a client has sent. Requests that name it hold it as long as they live."""

    __slots__ = (
        "__weakref__",
        "_image",
        "_keys",
        "_tiles",
        "_token_bytes",
        "digest",
        "error",
        "num_bytes",
        "num_tokens",
        "shape",
    )

    def __init__(self, image: ProcessedImage, shape: ImageShape, token_bytes: int, error: str = "") -> None:
        """It becomes an image of `shape`, an embedding of which takes `token_bytes`.

        `error`: nothing is made of it, because its arrays are wrong.
        """
        self.digest = image.digest
        self._image: ProcessedImage | None = None if error else image
        num_tiles = shape.num_tiles
        self._tiles: list[Tensor | None] = [None] * num_tiles
        """The embeddings [num_tokens of a tile, hidden_size] of each tile that was encoded, on the host."""
        self.shape = shape
        self._token_bytes = token_bytes
        self.num_tokens = num_tiles * shape.tile_tokens
        self.error = error
        """Why requests with the image are refused; empty: they are not."""
        self._keys: list[bytes] = [b""] * num_tiles
        """Of the tiles; empty: not computed yet, because that takes time."""
        size = 0 if error else sum(len(array.data) for array in image.arrays)
        self.num_bytes = size + self.num_tokens * token_bytes + _NAME_BYTES
        """Bytes of arrays and embeddings together, which are not there at the same time for long."""

    @property
    def current_bytes(self) -> int:
        """Bytes of the image as it is now; when all of its tiles are encoded, its arrays are gone."""
        return self.num_bytes if self._image is not None else self.num_tokens * self._token_bytes + _NAME_BYTES

    @property
    def tile_bytes(self) -> int:
        """Bytes of the arrays of a tile that is not encoded."""
        return sum(len(array.data) for array in self.processed.arrays) // len(self._tiles)

    def keys(self, first: int, last: int) -> bytes:
        """Return digests of the tiles in which the embeddings [first, last) are.

        The digest that a client gives need not be true, and other clients' requests find blocks of the KV cache by
        these.
        """
        numbers = range(first // self.shape.tile_tokens, -(-last // self.shape.tile_tokens))
        for number in numbers:
            if not self._keys[number]:
                assert self._image is not None
                self._keys[number] = _key(self._image.arrays, number, len(self._tiles))
        return b"".join(self._keys[number] for number in numbers)

    @property
    def processed(self) -> ProcessedImage:
        """What tiles are encoded from; it is there until all of them are."""
        assert self._image is not None, "a tile is encoded once"
        return self._image

    def missing_tile(self, first: int, last: int) -> int | None:
        """Return the first tile in which any of the embeddings [first, last) are that is not encoded; None if none."""
        size = self.shape.tile_tokens
        return next((tile for tile in range(first // size, -(-last // size)) if self._tiles[tile] is None), None)

    def note_encoded(self, tile: int, embeddings: "Tensor") -> None:
        """Keep the embeddings [num_tokens of a tile, hidden_size] of a tile, on the host."""
        self._tiles[tile] = embeddings
        if all(each is not None for each in self._tiles):
            self.keys(0, self.num_tokens)
            self._image = None

    def drop_embeddings(self) -> bool:
        """Forget the embeddings; return whether others can be made, because the arrays are there."""
        self._tiles = [None] * len(self._tiles)
        return self._image is not None

    def embeddings(self, first: int, last: int) -> "list[Tensor]":
        """Return the embeddings [first, last) of the image, in parts [n, hidden_size] on the host.

        No tile of them may be missing.
        """
        size = self.shape.tile_tokens
        parts = []
        for number in range(first // size, -(-last // size)):
            tile = self._tiles[number]
            assert tile is not None, "a step has tokens of images only once their tiles are encoded"
            parts.append(tile[max(0, first - number * size) : last - number * size])
        return parts


class ImageStore:
    """Keeps the latest images of all clients within a bound, each under the client's number and its digest.

    If there is no room, the client that has most loses the one that it used least recently.
    """

    def __init__(self, shape_of: Callable[[ProcessedImage], ImageShape], token_bytes: int, limit: int) -> None:
        """`shape_of` returns an image's shape; ValueError: the model's encoder takes no such arrays.

        `token_bytes` are those of an embedding. `limit` is the bound in bytes; 0: an image is kept until the first
        request with it arrives, and as long as requests hold it.
        """
        self._shape_of = shape_of
        self._token_bytes = token_bytes
        self._keeps_used = limit > 0
        self._limit = max(limit, _FRESH_BYTES)
        self._images: dict[int, OrderedDict[ImageDigest, StoredImage]] = {}
        self._held: dict[int, WeakValueDictionary[ImageDigest, StoredImage]] = {}
        """Those of each client that are kept, or that live requests hold."""
        self._num_bytes: dict[int, int] = {}
        """Of the images of each client."""

    @property
    def num_images(self) -> int:
        """Number of images that are kept."""
        return sum(map(len, self._images.values()))

    def put(self, client: int, image: ProcessedImage) -> None:
        """Keep an image of `client`. If its arrays are wrong, requests that name it learn why."""
        if image.digest in self._images.get(client, ()):
            self._images[client].move_to_end(image.digest)
            return
        held = self._held.setdefault(client, WeakValueDictionary())
        if (stored := held.get(image.digest)) is None:
            try:
                stored = StoredImage(image, self._shape_of(image), self._token_bytes)
            except ValueError as error:
                stored = StoredImage(image, ImageShape(0, 1), self._token_bytes, str(error))
            held[image.digest] = stored
        self._images.setdefault(client, OrderedDict())[image.digest] = stored
        self._num_bytes[client] = self._num_bytes.get(client, 0) + stored.num_bytes
        while sum(self._num_bytes.values()) > self._limit and self.num_images > 1:
            largest = max(self._num_bytes, key=lambda each: self._num_bytes[each])
            self._remove(largest, next(iter(self._images[largest])))

    def find(self, client: int, placed: Sequence[PlacedImage]) -> tuple[list[StoredImage], list[ImageDigest]]:
        """Return the images that a request of `client` names, or the digests of those that are not here."""
        held: Mapping[ImageDigest, StoredImage] = self._held.get(client, {})
        images = {digest: held.get(digest) for digest in dict.fromkeys(each.digest for each in placed)}
        if missing := [digest for digest, image in images.items() if image is None]:
            return [], missing
        kept: Mapping[ImageDigest, StoredImage] = self._images.get(client, {})
        for digest in [digest for digest in images if digest in kept]:
            if self._keeps_used:
                self._images[client].move_to_end(digest)
            else:
                self._remove(client, digest)
        return [image for each in placed if (image := images[each.digest]) is not None], []

    def clear(self) -> None:
        """Forget all images; live requests keep those that they name."""
        self._images.clear()
        self._held.clear()
        self._num_bytes.clear()

    def drop_client(self, client: int) -> None:
        """Forget the images of a client that is gone."""
        self._images.pop(client, None)
        self._held.pop(client, None)
        self._num_bytes.pop(client, None)

    def _remove(self, client: int, digest: ImageDigest) -> None:
        stored = self._images[client].pop(digest, None) if client in self._images else None
        if stored is not None:
            self._num_bytes[client] -= stored.num_bytes
            if not self._images[client]:
                del self._images[client], self._num_bytes[client]


def _key(arrays: Sequence[ImageArray], tile: int, num_tiles: int) -> bytes:
    """Return a digest of what `arrays`, which have as much of each of `num_tiles` tiles, have of one of them."""
    digest = hashlib.sha256()
    for array in arrays:
        size = len(array.data) // num_tiles
        digest.update(repr((array.name, array.dtype, size)).encode())
        digest.update(memoryview(array.data)[tile * size : (tile + 1) * size])
    return digest.digest()
