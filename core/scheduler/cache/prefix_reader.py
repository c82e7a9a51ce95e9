"""Reads blocks of the prefix cache file into blocks of the KV cache, for requests that are about to be admitted."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from vllm_mp.core.scheduler.cache.prefix_file import PrefixFile

logger = logging.getLogger(__name__)

_REFRESH_S: Final = 1.0
"""Time for which blocks that were written in the meantime may not be found."""
_REFRESH_SHARE: Final = 0.005
"""Share of the core's time that learning of them may take."""


class PrefixReader:
    """The core's end of the file. An error of the disk ends its use, and is logged once."""

    def __init__(
        self,
        file: PrefixFile,
        views: Callable[[int], Sequence[memoryview]],
        beat: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`views` returns the memory of a block, in the order of the file. `beat` is called after each block."""
        self._file = file
        self._views = views
        self._beat = beat
        self.clock = clock
        """Returns seconds."""
        self._refresh_at = clock() + _REFRESH_S
        self.num_blocks_read = 0
        self._is_usable = True

    def has(self, digest: bytes) -> bool:
        """Return whether the block with this hash can be read; it may turn out to be damaged."""
        if not self._is_usable:
            return False
        if self._file.has(digest):
            return True
        if (started := self.clock()) < self._refresh_at:
            return False
        self._try(self._file.load)
        seconds = self.clock() - started
        self._refresh_at = started + max(_REFRESH_S, seconds / _REFRESH_SHARE)
        return self._file.has(digest)

    def expect(self, digests: Iterable[bytes]) -> None:
        """Let the system fetch the blocks with these hashes in the background."""
        self._try(lambda: self._file.expect(digests))

    def read(self, digest: bytes, block: int) -> bool:
        """Read what `has` has found into `block`, which must have no other user; return whether it is the content."""
        is_read = self._try(lambda: self._file.read(digest, self._views(block)))
        self.num_blocks_read += is_read
        self._beat()
        return is_read

    def note_used(self, digests: Sequence[bytes]) -> None:
        """Note that the blocks with these hashes, which follow one another, are used now: others are evicted first."""
        self._try(lambda: self._file.note_used(digests))

    def clear(self) -> None:
        """Remove all blocks from the file."""
        self._try(self._file.clear)

    def _try(self, action: Callable[[], bool | None]) -> bool:
        """Return what `action` returns; False if the file cannot be used any more."""
        if not self._is_usable:
            return False
        try:
            return bool(action())
        except OSError as error:
            self._is_usable = False
            logger.warning("the prefix cache file is not used any more, and prompts are read again: %s", error)
            return False
