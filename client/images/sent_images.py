"""The images that a client has sent to a core."""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Final
from weakref import WeakKeyDictionary

from vllm_mp.requests.images import ProcessedImage

_MAX_DIGESTS: Final = 2**14
"""Digests that are kept; an image whose digest was forgotten is sent once more."""
_MAX_ATTEMPTS: Final = 8
"""How often a request is sent because the core lacks its images. Each time, other requests may have replaced them."""
_MAX_REPLAY_ATTEMPTS: Final = 256
"""The same for a replay, which waits between two attempts."""


class SentImages:
    """What a client believes of the images that a core has; the core says if it has lost one (`MissingImages`)."""

    def __init__(self) -> None:
        self._digests: OrderedDict[bytes, None] = OrderedDict()
        """Those of the images that were sent, the one that was used last at the end."""
        self._attempts: WeakKeyDictionary[Hashable, Counter[int]] = WeakKeyDictionary()
        """By stream, and by the index of its completion."""

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._digests

    def missing(self, images: Mapping[bytes, ProcessedImage]) -> Iterator[ProcessedImage]:
        """Return those of `images` that must be sent before a request that needs them; the caller sends each."""
        for digest, image in images.items():
            is_new = digest not in self._digests
            self._digests[digest] = None
            self._digests.move_to_end(digest)
            if is_new:
                yield image
        while len(self._digests) > _MAX_DIGESTS:
            self._digests.popitem(last=False)

    def may_send_again(self, stream: Hashable, index: int, is_replay: bool) -> bool:
        """Count that the core lacked images of a request, the completion `index` of a stream.

        Return whether the request, or replay, may be sent once more.
        """
        attempts = self._attempts.setdefault(stream, Counter())
        attempts[index] += 1
        return attempts[index] < (_MAX_REPLAY_ATTEMPTS if is_replay else _MAX_ATTEMPTS)

    def forget(self, digests: Iterable[bytes]) -> None:
        """Note that the core does not have these images."""
        for digest in digests:
            self._digests.pop(digest, None)

    def clear(self) -> None:
        """Note that the core, or its successor, may have none of the images."""
        self._digests.clear()
