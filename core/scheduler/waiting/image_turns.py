"""Requests that wait until images of their prompts are encoded, and the tiles whose turn it is.

Encoding a tile may take minutes on a CPU. So it goes on in slices between steps, and its request waits outside of the
queue meanwhile, where it blocks no other request. Once the tiles that it needs are encoded, it is queued again in its
order, and finds the blocks of the KV cache that equal prompts have filled.

Lines take turns (`FairTurns`) by the embeddings that are encoded for them. A few tiles of different lines are encoded
side by side, by turns of one slice, so that a small image does not wait for all of a large one.
"""

from typing import Final, NamedTuple

from vllm_mp.core.images.image_store import StoredImage
from vllm_mp.core.scheduler.request import Request, RequestKey
from vllm_mp.core.scheduler.waiting.fair_turns import FairTurns
from vllm_mp.requests.images import MAX_IMAGE_BYTES

_MAX_BEGUN: Final = 4
"""Number of tiles that are encoded side by side."""
_MAX_BEGUN_BYTES: Final = 2 * MAX_IMAGE_BYTES
"""Bound on the bytes of their arrays. What is computed of a tile takes a multiple of that."""


class BegunTile(NamedTuple):
    """A tile that is being encoded."""

    request: Request
    """A request that waits for it."""
    image: StoredImage
    tile: int


class ImageTurns:
    """Requests that wait for tiles of images."""

    def __init__(self) -> None:
        self._turns = FairTurns()
        self._first_token: dict[RequestKey, int] = {}
        """By request: the first of its tokens that is not cached, from which on it needs its images."""
        self._requests_of: dict[StoredImage, dict[RequestKey, Request]] = {}
        """The requests that wait and name an image; no image has none."""
        self.num_suspects = 0
        """Number of the waiting requests that are suspects, which wait with their groups too."""
        self._begun: list[BegunTile] = []
        """In the order of their turns."""

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._first_token)

    def __contains__(self, request: Request) -> bool:
        return request.key in self._first_token

    @property
    def begun(self) -> list[BegunTile]:
        """The tiles that are being encoded, and that requests still wait for."""
        self._begun = [
            tile if tile.request in self else tile._replace(request=next(iter(requests.values())))
            for tile in self._begun
            if (requests := self._requests_of.get(tile.image))
        ]
        return self._begun

    def requests(self) -> list[Request]:
        """Return the waiting requests."""
        return self._turns.requests()

    def requests_with(self, image: StoredImage) -> list[Request]:
        """Return the waiting requests that name an image."""
        return list(self._requests_of.get(image, {}).values())

    def add(self, request: Request, first_token: int) -> None:
        """Let a request wait for the images of its tokens from `first_token` on, one of which is not encoded."""
        assert request.images is not None
        self._first_token[request.key] = first_token
        self._turns.add(request)
        self.num_suspects += request.isolate_until_num_tokens != 0
        for image in request.images.images:
            self._requests_of.setdefault(image, {})[request.key] = request

    def remove(self, request: Request) -> None:
        """Remove a request that waits here."""
        assert request.images is not None
        del self._first_token[request.key]
        self._turns.remove(request)
        self.num_suspects -= request.isolate_until_num_tokens != 0
        for image in request.images.images:
            del self._requests_of[image][request.key]
            if not self._requests_of[image]:
                del self._requests_of[image]

    def next(self) -> BegunTile | None:
        """Return the tile of which the next slice is encoded; None if no request waits."""
        begun = self.begun
        request = self._turns.first()
        if request is not None and self._may_begin(request):
            image, tile = self._missing_tile(request)
            self._turns.take_turn(request, image.shape.tile_tokens)
            self._turns.add(request)
            begun.insert(0, BegunTile(request, image, tile))
        if not begun:
            return None
        best = min(tile.request.order[0] for tile in begun)
        index = next(i for i, tile in enumerate(begun) if tile.request.order[0] == best)
        begun.append(begun.pop(index))
        return begun[-1]

    def note_encoded(self, tile: BegunTile) -> list[Request]:
        """Note that the embeddings of a tile are there; remove and return the requests that need no more."""
        self._begun.remove(tile)
        ready = [request for request in self.requests_with(tile.image) if self._find_missing_tile(request) is None]
        for request in ready:
            self.remove(request)
        return ready

    def forget(self, client: int) -> None:
        """Forget the turns of a client that has left and has no request."""
        self._turns.forget(client)

    def _may_begin(self, request: Request) -> bool:
        """Return whether a tile of the request whose turn is next may be encoded beside those that are."""
        image, tile = self._missing_tile(request)
        if any(begun.image is image and begun.tile == tile for begun in self._begun):
            return False
        if all(request.order[0] < begun.request.order[0] for begun in self._begun):
            return True
        num_bytes = sum(begun.image.tile_bytes for begun in self._begun) + image.tile_bytes
        is_one_of_line = all(begun.request.line != request.line for begun in self._begun)
        return len(self._begun) < _MAX_BEGUN and num_bytes <= _MAX_BEGUN_BYTES and is_one_of_line

    def _missing_tile(self, request: Request) -> tuple[StoredImage, int]:
        """Return the next tile that a waiting request needs."""
        found = self._find_missing_tile(request)
        assert found is not None, "a request waits only for tiles that are not encoded"
        return found

    def _find_missing_tile(self, request: Request) -> tuple[StoredImage, int] | None:
        assert request.images is not None
        return request.images.missing_tile(self._first_token[request.key], request.num_prompt_tokens)
