"""The blocks that the KV cache of a simulated core holds, by hash. A block has the router's `CHUNK_TOKENS`."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class Holders:
    """For each hash the cores that hold its block, as bits of a number."""

    def __init__(self) -> None:
        self.masks: dict[int, int] = {}

    def hits(self, hashes: Sequence[int]) -> dict[int, int]:
        """Return for each core that holds the first of `hashes` how many of the first ones it holds."""
        found: dict[int, int] = {}
        left = self.masks.get(hashes[0], 0) if hashes else 0
        for count, block in enumerate(hashes):
            ends, left = left & ~self.masks.get(block, 0), left & self.masks.get(block, 0)
            _set_all(found, ends, count)
            if not left:
                return found
        _set_all(found, left, len(hashes))
        return found


def _set_all(found: dict[int, int], mask: int, count: int) -> None:
    while mask:
        bit = mask & -mask
        found[bit.bit_length() - 1] = count
        mask ^= bit


class PrefixCache:
    """Blocks in use, with the number of requests that use each, and idle ones, which are evicted by age."""

    def __init__(self, core: int, holders: Holders) -> None:
        self.users: dict[int, int] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()
        """The block that has been idle for longest comes first."""
        self._holders, self._bit = holders.masks, 1 << core

    def find(self, hashes: Sequence[int], limit: int) -> int:
        """Return how many of the first `limit` blocks are cached, up to the first one that is not."""
        users, idle = self.users, self.idle
        for count in range(min(limit, len(hashes))):
            if hashes[count] not in users and hashes[count] not in idle:
                return count
        return min(limit, len(hashes))

    def num_idle_among(self, hashes: Iterable[int]) -> int:
        return sum(block in self.idle for block in hashes)

    def share(self, hashes: Sequence[int]) -> None:
        """Add a use of each of `hashes`, which must be cached."""
        for block in hashes:
            if block in self.users:
                self.users[block] += 1
            else:
                del self.idle[block]
                self.users[block] = 1

    def register(self, block: int) -> bool:
        """Cache a block that its first request uses; return False, without effect, if it is cached already."""
        if block in self.users or block in self.idle:
            return False
        self.users[block] = 1
        self._holders[block] = self._holders.get(block, 0) | self._bit
        return True

    def release(self, hashes: Sequence[int]) -> int:
        """End a use of each of `hashes`; return how many blocks became idle."""
        num_idle = 0
        for block in reversed(hashes):  # the end of a prefix is evicted first
            if self.users[block] > 1:
                self.users[block] -= 1
            else:
                del self.users[block]
                self.idle[block] = None
                num_idle += 1
        return num_idle

    def evict(self, max_idle: int) -> None:
        """Forget the oldest idle blocks until at most `max_idle` are left."""
        while len(self.idle) > max_idle:
            self._forget(self.idle.popitem(last=False)[0])

    def clear(self) -> None:
        """Forget all blocks."""
        for blocks in (self.users, self.idle):
            for block in blocks:
                self._forget(block)
            blocks.clear()

    def _forget(self, block: int) -> None:
        left = self._holders[block] & ~self._bit
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]
