"""The tiles of images that are being encoded, each as far as its slices have got."""

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from vllm_mp.core.images.encoder import ImageEncoder
from vllm_mp.core.images.image_store import StoredImage
from vllm_mp.core.images.sliced_call import SlicedCall

Tile = tuple[StoredImage, int]
"""An image, and the index of one of its tiles."""


_NO_MEMORY_MESSAGES = ("can't allocate memory", "can't start new thread")
"""Parts of the messages of plain RuntimeErrors that say that the host lacks memory."""


class NoMemoryForImageError(Exception):
    """There is no memory in which to encode an image."""


class ImageEncodings:
    """Encodes tiles in slices; each tile has a thread, which stands still between its slices."""

    def __init__(self, encoder: ImageEncoder, beat: Callable[[], None]) -> None:
        """`beat` is called often during a slice, so that a long one can be told from one that hangs."""
        self._encoder = encoder
        self.beat = beat
        self._calls: dict[Tile, SlicedCall[Tensor]] = {}
        self.num_encoded = 0
        """Number of tiles that were encoded."""

    def advance(self, image: StoredImage, tile: int, seconds: float) -> bool:
        """Encode a tile for about `seconds` more; return whether it has been encoded, and `image` has its embeddings.

        Where an encoding cannot pause, it is always encoded. Raises NoMemoryForImageError if host or device have no
        memory for it; then nothing is left of the encoding.
        """
        try:
            return self._advance(image, tile, seconds)
        except (MemoryError, RuntimeError) as error:
            if not _lacks_memory(error):
                raise
            self._calls.pop((image, tile), None)
            why = f"{str(error).strip() or repr(error):.200}"
        # Outside of `except`, because the error's frames refer to what the encoding has computed.
        raise NoMemoryForImageError(why)

    def _advance(self, image: StoredImage, tile: int, seconds: float) -> bool:
        if not self._encoder.may_pause:
            self._note_end(image, tile, self._encoder.encode(image.processed, tile, tile + 1, self.beat))
            return True
        if (call := self._calls.get((image, tile))) is None:
            processed = image.processed

            def encode(pause: Callable[[], None]) -> Tensor:
                def pause_point() -> None:
                    self.beat()
                    pause()

                return self._encoder.encode(processed, tile, tile + 1, pause_point)

            call = self._calls[image, tile] = SlicedCall(encode, "image-encoding")
        result = call.advance(seconds)
        if result:
            del self._calls[image, tile]
            self._note_end(image, tile, result[0])
        return bool(result)

    def keep(self, tiles: Collection[Tile]) -> None:
        """Give up the encodings of all but `tiles`, and free what they have computed."""
        for tile in [tile for tile in self._calls if tile not in tiles]:
            self._calls.pop(tile).stop()

    def _note_end(self, image: StoredImage, tile: int, embeddings: Tensor) -> None:
        self.num_encoded += 1
        image.note_encoded(tile, embeddings.cpu())


def _lacks_memory(error: Exception) -> bool:
    """Return whether `error` says that memory is missing, and not that a device has failed."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(part in str(error) for part in _NO_MEMORY_MESSAGES)
