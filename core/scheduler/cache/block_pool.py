"""The blocks of the KV cache: their users, the free blocks, and the blocks that can be found by their hash."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from vllm_mp.core.scheduler.cache.seal_table import FoundBlocks, SealTable


class BlockPool:
    """Allocates block ids and frees them, counting how many requests share each block.

    A full block can be registered under the hash of its tokens and of all tokens before it. A block without users is
    free, but can still be found by that hash until it is allocated again. The block that has been free for longest is
    allocated first: eviction is least recently used, and takes constant time.

    Block 0 is never allocated: block tables are padded with it, so that no padded write can reach a request's block.
    """

    def __init__(self, num_blocks: int, table: SealTable | None = None) -> None:
        """`num_blocks` counts the padding block. `table` loses the entry of each block that is allocated."""
        self.num_blocks = num_blocks - 1
        """Number of blocks, without the padding block."""
        self._num_users = np.zeros(num_blocks, np.int32)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        """Free blocks; the block that has been free for longest comes first."""
        self.num_returned = 0
        """Number of uses of blocks that have ended so far. While it stays the same, no block becomes free."""
        self._block_of: dict[bytes, int] = {}
        """Registered blocks by hash; `_hash_of` is its inverse."""
        self._hash_of: dict[int, bytes] = {}
        self._table = table
        self.num_found = 0
        """Number of blocks that an earlier core has left."""
        self._found: FoundBlocks | None = None
        """What `adopt` was given; None once each of these blocks was allocated again or forgotten."""
        self._after: dict[bytes, list[int]] = {}
        """Indices in `_found` by the hash of what precedes each block, as far as it was not allocated since."""
        self._index_of: dict[int, int] = {}
        """The index in `_found` of each block in `_after`."""

    @property
    def num_free(self) -> int:
        """Number of blocks without a user, whether or not they can be found by their hash."""
        return len(self._free)

    def allocate(self, count: int) -> npt.NDArray[np.int32]:
        """Return `count` block ids [count] for one user; raise RuntimeError if fewer are free."""
        if count > len(self._free):
            raise RuntimeError(f"cannot allocate {count} blocks: {len(self._free)} are free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
        result = np.array(blocks, np.int32)
        if self._table is not None:
            self._table.forget(result)
            self._table.note_use(result)
        self._num_users[result] = 1
        return result

    def free(self, blocks: npt.NDArray[np.int32]) -> None:
        """End one use of each of `blocks` [n], in the order of their tokens; raise RuntimeError if a block is free."""
        if (self._num_users[blocks] <= 0).any():
            raise RuntimeError(f"blocks {blocks[self._num_users[blocks] <= 0].tolist()} are free already")
        self.num_returned += len(blocks)
        self._num_users[blocks] -= 1
        # From the last to the first, so that the beginning, which more requests share, is evicted last.
        unused = blocks[self._num_users[blocks] == 0][::-1].tolist()
        self._free.update(dict.fromkeys(unused))
        if self._table is not None:
            self._table.note_end(unused)

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks registered under `hashes`, up to the first hash without a block."""
        blocks = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_free_among(self, blocks: list[int]) -> int:
        """Return how many of `blocks` are free now; `share` would take these from the free blocks."""
        return int((self._num_users[blocks] == 0).sum()) if blocks else 0

    def share(self, blocks: list[int]) -> None:
        """Add one user to each of `blocks`, which `find` has just returned."""
        for block in blocks:
            self._free.pop(block, None)
        self._num_users[blocks] += 1
        if self._table is not None:
            self._table.note_use(blocks)

    def register(self, block: int, digest: bytes) -> None:
        """Let `find` return `block` for `digest`, unless another block is registered under it.

        The tokens of the block must be computed before any request that finds the block reads it.
        """
        if digest not in self._block_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest

    def adopt(self, found: FoundBlocks) -> None:
        """Let the blocks of an earlier core be found. No block may be in use or registered."""
        self._found, self.num_found = found, len(found)
        full = np.flatnonzero(found.is_full).tolist()  # of equal blocks the one that is evicted last is registered
        self._block_of = {found.digests[at]: found.blocks[at] for at in full}
        self._hash_of = {block: digest for digest, block in self._block_of.items()}
        self._index_of = {block: at for at, block in enumerate(found.blocks)}
        for at, before in enumerate(found.before):
            self._after.setdefault(before, []).append(at)
        for block in found.blocks:
            self._free.move_to_end(block)

    def find_begun(self, before: bytes, tokens: npt.NDArray[np.int32]) -> tuple[int, int]:
        """Return a free block of an earlier core that begins with some of `tokens` [n], and with how many.

        They are those after the tokens with the hash `before`. Of several blocks, it is one that holds most of them,
        and of these one with the fewest others, which an equal request that was further may need. (0, 0): none.
        """
        if before not in self._after or not len(tokens):
            return 0, 0
        assert self._found is not None
        blocks, num_common, num_others = self._found.compare(self._after[before], tokens)
        is_usable = (self._num_users[blocks] == 0) & (num_common > 0)
        rank = np.where(is_usable, num_common * (1 + num_others.max()) - num_others, 0)
        best = int(rank.argmax())
        return (int(blocks[best]), int(num_common[best])) if rank[best] else (0, 0)

    def take_begun(self, block: int, count: int) -> None:
        """Give the block that `find_begun` has just returned to one user, who goes on after `count` tokens of it."""
        del self._free[block]
        self._num_users[block] = 1
        self._forget(block)
        if self._table is not None:
            self._table.note_use([block])
            self._table.seal(np.array([block], np.int32), count)

    def forget_all(self) -> None:
        """Remove all hashes, so that no block is found. Blocks in use stay with their users."""
        for records in (self._block_of, self._hash_of, self._after, self._index_of):
            records.clear()
        self._found = None
        if self._table is not None:
            self._table.clear()

    def _forget(self, block: int) -> None:
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
        at = self._index_of.pop(block, None)
        if at is None:
            return
        assert self._found is not None
        before = self._found.before[at]
        self._after[before].remove(at)
        if not self._after[before]:
            del self._after[before]
        if not self._index_of:
            self._found = None


def root_hash(salt: str, adapter: int = 0) -> bytes:
    """Return the hash that precedes the first block of a request.

    Requests with different `salt` share no blocks, and neither do requests with different adapters; `adapter` is the
    number of the adapter's weights, 0 for the base model.
    """
    # No text begins with the byte 0xFF, so that no salt stands for an adapter.
    prefix = b"\xff" + adapter.to_bytes(8, "little") if adapter else b""
    return hashlib.sha256(prefix + salt.encode()).digest()


def chain_hash(before: bytes, content: bytes) -> bytes:
    """Return the hash of a block that follows a block with the hash `before`.

    `content` is the ids of its tokens, of equal width, and after them the embeddings in it, if there are any.

    SHA-256, because a client that found a collision could read another request's context.
    """
    return hashlib.sha256(before + content).digest()
