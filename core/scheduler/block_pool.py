"""The KV cache's blocks: who uses them, which are free, and which can be found again by what they hold."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


class BlockPool:
    """Hands out block ids and takes them back, counting how many requests share each.

    A full block can be registered under the hash of its tokens and of all tokens before it. When nobody uses it any
    more it is free, but can be found by that hash until it is handed out anew; the block that has been free for the
    longest goes first, so eviction is least recently used, and takes constant time.

    Block 0 is never handed out: block tables are padded with it, so that no padded write can reach a request's block.
    """

    def __init__(self, num_blocks: int) -> None:
        """`num_blocks` counts the padding block."""
        self.num_blocks = num_blocks - 1
        self._num_users = np.zeros(num_blocks, np.int32)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        """Free longest first."""
        self.num_returned = 0
        """Uses of blocks that have ended so far: as long as it stays the same there is no more room."""
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses, those that can be found by their hash among them."""
        return len(self._free)

    def allocate(self, count: int) -> npt.NDArray[np.int32]:
        """`count` block ids [count] for one user; the caller has checked that `num_free` is at least that."""
        if count > len(self._free):
            raise RuntimeError(f"{count} blocks asked for, {len(self._free)} free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
        result = np.array(blocks, np.int32)
        self._num_users[result] = 1
        return result

    def free(self, blocks: npt.NDArray[np.int32]) -> None:
        """End one use of each of `blocks` [n], in a request's order; raises RuntimeError if one is not in use."""
        if (self._num_users[blocks] <= 0).any():
            raise RuntimeError(f"blocks {blocks[self._num_users[blocks] <= 0].tolist()} are free already")
        self.num_returned += len(blocks)
        self._num_users[blocks] -= 1
        # From the end, so that the beginning, which more requests have in common, is evicted last.
        for block in reversed(blocks[self._num_users[blocks] == 0].tolist()):
            self._free[block] = None

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks registered under `hashes`, up to the first that there is none for."""
        blocks = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_free_among(self, blocks: list[int]) -> int:
        """How many of `blocks` count as free now, and would not after `share`."""
        return int((self._num_users[blocks] == 0).sum()) if blocks else 0

    def share(self, blocks: list[int]) -> None:
        """Begin one more use of each of `blocks`, which `find` has just given."""
        for block in blocks:
            self._free.pop(block, None)
        self._num_users[blocks] += 1

    def register(self, block: int, digest: bytes) -> None:
        """Let `block` be found under `digest`, unless another one is already.

        Its tokens are computed, or will be before anyone who has found it reads it.
        """
        if digest not in self._block_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest

    def forget_all(self) -> None:
        """Let no block be found any more; blocks in use stay with their users."""
        self._block_of.clear()
        self._hash_of.clear()

    def _forget(self, block: int) -> None:
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]


def root_hash(salt: str) -> bytes:
    """What the hash of a first block builds on; requests of different `salt` have no block in common."""
    return hashlib.sha256(salt.encode()).digest()


def chain_hash(before: bytes, tokens: bytes) -> bytes:
    """The hash of a block of `tokens`, ids of one width, behind blocks whose last hash is `before`.

    A cryptographic one, because whoever found a collision could read another request's context.
    """
    return hashlib.sha256(before + tokens).digest()
