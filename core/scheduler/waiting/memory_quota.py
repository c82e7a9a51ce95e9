"""The memory of the core that live requests take, and the share of each owner, client and tenant."""

from collections import Counter
from typing import TYPE_CHECKING, TypeVar

from vllm_mp.core.scheduler.request import Line, Request

if TYPE_CHECKING:
    from vllm_mp.core.images.image_store import StoredImage

MAX_BYTES = 2**31
"""Limit for all live requests together: bytes of their messages on the wire and of their images, and `REQUEST_BYTES`
for each."""
REQUEST_BYTES = 2**10
"""Bytes that a request takes beside its message."""


_Party = TypeVar("_Party", Line, str)
_OWNER_SHARE = 0.75
"""Share of what other owners leave that all requests of one owner may take."""


class _HeldImage:
    """An image that live requests of a line hold."""

    __slots__ = ("image", "num_bytes", "num_requests")

    def __init__(self, image: "StoredImage") -> None:
        self.image = image
        self.num_bytes = 0
        """Bytes that are counted for it."""
        self.num_requests = 0


class NoRoomError(ValueError):
    """There is no memory for a request, until others have ended."""


class MemoryQuota:
    """Counts the bytes of live requests, by the owners of clients and by the lines of each owner.

    An owner may take most of what other owners leave, and a line as much as it leaves of that for others (the dynamic
    threshold of Choudhury and Hahne, 1998): the first line gets at most a half of it, the next a quarter. So some
    memory is always left for a new line, and for a new owner, however many clients another owner has.
    """

    def __init__(self) -> None:
        self._used: Counter[Line] = Counter()
        self._used_by_owner: Counter[str] = Counter()
        self._total = 0
        self._images: dict[Line, dict[int, _HeldImage]] = {}
        """The images of the requests of each line, which count once; by the id of the image."""

    def check(self, request: Request) -> None:
        """Raise NoRoomError if there is no room for `request`.

        There always is for a replay if its owner has no other request. An earlier core may have got its images one
        after the other, with earlier requests.
        """
        num_bytes = request.num_bytes
        if request.images is not None:
            self._count_again(request.line, request.owner)
            held = self._images.get(request.line, {})
            num_bytes += sum(image.current_bytes for image in request.images.images if id(image) not in held)
        own = self._used_by_owner[request.owner]
        if request.is_replay and not own:
            return
        room = int(_OWNER_SHARE * (MAX_BYTES - self._total + own)) - own - num_bytes
        if self._used[request.line] + num_bytes > room:
            raise NoRoomError(
                f"no room for a request of {num_bytes} bytes: the live requests of this client take "
                f"{self._used[request.line]} bytes, all requests of its process or key {own}, the requests of all "
                f"clients {self._total} of {MAX_BYTES} bytes; wait until some of them have ended"
            )

    def take(self, request: Request) -> None:
        """Count the bytes of `request`."""
        self._add(request.line, request.owner, request.num_bytes)
        if request.images is None:
            return
        of_line = self._images.setdefault(request.line, {})
        for image in request.images.images:
            held = of_line.setdefault(id(image), _HeldImage(image))
            held.num_requests += 1
            self._count(held, image.current_bytes, request.line, request.owner)

    def give_back(self, request: Request) -> None:
        """Count the bytes of `request` no longer."""
        self._add(request.line, request.owner, -request.num_bytes)
        if request.images is None:
            return
        of_line = self._images[request.line]
        for image in request.images.images:
            held = of_line[id(image)]
            held.num_requests -= 1
            if not held.num_requests:
                self._count(held, 0, request.line, request.owner)
                del of_line[id(image)]
        if not of_line:
            del self._images[request.line]

    def _count_again(self, line: Line, owner: str) -> None:
        """Count the images of a line as they are now."""
        for held in self._images.get(line, {}).values():
            self._count(held, held.image.current_bytes, line, owner)

    def _count(self, held: _HeldImage, num_bytes: int, line: Line, owner: str) -> None:
        """Count `num_bytes` for an image, instead of what was counted for it."""
        self._add(line, owner, num_bytes - held.num_bytes)
        held.num_bytes = num_bytes

    def _add(self, line: Line, owner: str, num_bytes: int) -> None:
        _add(self._used, line, num_bytes)
        _add(self._used_by_owner, owner, num_bytes)
        self._total += num_bytes


def _add(counts: Counter[_Party], party: _Party, num_bytes: int) -> None:
    counts[party] += num_bytes
    if not counts[party]:
        del counts[party]
