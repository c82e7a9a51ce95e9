"""The KV cache's blocks: which are free."""

import numpy as np
import numpy.typing as npt


class BlockPool:
    """Hands out block ids and takes them back; every block has one owner, the pool or a request.

    Block 0 is never handed out: block tables are padded with it, so that padding reads finite values and no
    padded write can reach a request's block.
    """

    def __init__(self, num_blocks: int) -> None:
        """`num_blocks` counts the padding block."""
        self._free: npt.NDArray[np.int32] = np.arange(num_blocks - 1, 0, -1, dtype=np.int32)
        self._is_free = np.ones(num_blocks, dtype=np.bool_)
        self._is_free[0] = False
        self.num_blocks = num_blocks - 1
        self.num_free = num_blocks - 1

    def allocate(self, count: int) -> npt.NDArray[np.int32]:
        """`count` block ids [count]; the caller has checked that `num_free` is at least that."""
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks asked for, {self.num_free} free")
        self.num_free -= count
        blocks = self._free[self.num_free : self.num_free + count].copy()
        self._is_free[blocks] = False
        return blocks

    def free(self, blocks: npt.NDArray[np.int32]) -> None:
        """Take back `blocks` [n]; raises RuntimeError if one of them is not in use."""
        if self._is_free[blocks].any() or (blocks <= 0).any():
            raise RuntimeError(f"blocks {blocks[self._is_free[blocks]].tolist()} are free already")
        self._is_free[blocks] = True
        self._free[self.num_free : self.num_free + len(blocks)] = blocks
        self.num_free += len(blocks)
