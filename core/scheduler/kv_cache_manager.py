"""Which blocks of the KV cache running requests have, and which filled blocks later requests find.

A block can be found by other requests from the moment at which the step that fills it is scheduled. A request of the
same step may therefore build on blocks that rows before it are about to fill. Requests with a common beginning compute
it once, even if they arrive together. This relies on an invariant of every model: each layer writes the keys and values
of all rows of a step before it attends for any of them.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from vllm_mp.core.scheduler.batch import NEVER_REGISTERS, Batch, Mask, Rows
from vllm_mp.core.scheduler.block_pool import BlockPool, chain_hash
from vllm_mp.core.scheduler.request import Request


class KVCacheManager:
    """Owns the block pool, and the columns `block_table`, `num_blocks` and `num_registered` of the batch."""

    def __init__(self, batch: Batch, num_blocks: int, block_size: int) -> None:
        """`num_blocks` counts the padding block; `block_size` is in tokens."""
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self._batch = batch
        self.num_prompt_tokens = 0
        """Tokens of the prompts that have got blocks; without requests of an earlier core, which continue."""
        self.num_cached_tokens = 0
        """Tokens among them that the prefix cache held."""

    def find_prefix(self, request: Request) -> list[int]:
        """Return the cached blocks that hold the beginning of `request`, never its last token."""
        if not request.hashes or not request.reads_cache:
            return []
        # The last token is always computed, because the next token is sampled from its logits.
        num_full = (len(request.tokens) - 1) // self.block_size
        return self.pool.find(self._block_hashes(request, request.tokens, 0, num_full))

    def has_room(self, request: Request, found: list[int], spare: int = 0) -> bool:
        """Return whether the pool has the blocks that `request` needs beside the blocks `found`, and `spare` more."""
        needed = self._blocks_for(len(request.tokens)) - len(found)
        return needed + spare <= self.pool.num_free - self.pool.num_free_among(found)

    def allocate(self, request: Request, found: list[int]) -> npt.NDArray[np.int32]:
        """Return blocks [n] for all tokens of `request`, which must get them with its row.

        `found`, the first of them, are the blocks that `find_prefix` has just returned. The pool must have room.
        """
        if request.num_cached_tokens is None:
            is_new = len(request.tokens) == request.num_prompt_tokens
            request.num_cached_tokens = len(found) * self.block_size if is_new else 0
            self.num_prompt_tokens += is_new * request.num_prompt_tokens
            self.num_cached_tokens += request.num_cached_tokens
        self.pool.share(found)
        new = self.pool.allocate(self._blocks_for(len(request.tokens)) - len(found))
        return np.concatenate([np.array(found, np.int32), new])

    def remove_row(self, row: int) -> None:
        """Take `row` and its blocks from its request."""
        self.pool.free(self._batch.remove(row))

    def growing_rows(self, excluded: Mask | None = None) -> Rows:
        """Return the rows [n] whose last token needs one more block, without `excluded` [max_num_seqs]."""
        batch, rows = self._batch, self._batch.order
        growing = rows[batch.num_tokens[rows] > batch.num_blocks[rows] * self.block_size]
        return growing if excluded is None else growing[~excluded[growing]]

    def grow(self, rows: Rows) -> None:
        """Give each of `rows` [n] one more block; the pool must have n free blocks."""
        if len(rows):
            batch = self._batch
            batch.block_table[rows, batch.num_blocks[rows]] = self.pool.allocate(len(rows))
            batch.num_blocks[rows] += 1

    def register_decodes(self, rows: Rows, awaits: Rows) -> None:
        """Register the blocks of `rows` [n] that are full when one more token of each row is computed.

        `awaits` are indexes into `rows`. The last token of these rows is not known yet, so it counts for no block.
        """
        batch = self._batch
        num_tokens = batch.num_computed_tokens[rows] + 1
        num_tokens[awaits] -= 1
        due = num_tokens // self.block_size > batch.num_registered[rows]
        for row, count in zip(rows[due].tolist(), num_tokens[due].tolist(), strict=True):
            self.register(row, count)

    def register(self, row: int, num_tokens: int) -> None:
        """Let other requests find the blocks that the first `num_tokens` tokens of `row` fill.

        The tokens must be computed, or the step that is being scheduled computes them and must not be given up.
        """
        batch, num_full = self._batch, num_tokens // self.block_size
        registered = int(batch.num_registered[row])
        if num_full <= registered:
            return
        blocks = batch.block_table[row, registered:num_full].tolist()
        hashes = self._block_hashes(batch.request(row), batch.token_ids[row], registered, num_full)
        for block, digest in zip(blocks, hashes, strict=True):
            self.pool.register(block, digest)
        batch.num_registered[row] = num_full

    def forget_prefixes(self) -> None:
        """Stop filled blocks from being found, and later blocks of the running requests, which build on them."""
        self.pool.forget_all()
        self._batch.num_registered[self._batch.order] = NEVER_REGISTERS

    def _block_hashes(self, request: Request, tokens: npt.NDArray[np.int32], first: int, last: int) -> Iterator[bytes]:
        """Yield the hashes of the blocks [first, last) of `request`, whose tokens begin with `tokens`.

        A missing hash is computed when it is asked for, because a long prompt has many blocks and often only the first
        is looked up. All hashes before `first` must exist.
        """
        hashes = request.hashes
        known = len(hashes) - 1
        yield from hashes[first + 1 : last + 1]
        data = tokens[known * self.block_size : last * self.block_size].tobytes()
        size = self.block_size * tokens.itemsize
        embeds = request.prompt_embeds
        for block, start in enumerate(range(0, len(data), size), known):
            content = data[start : start + size]
            if embeds is not None and block * self.block_size < embeds.num_tokens:
                # Longer than the ids of any block, so no prompt of tokens has this hash.
                rows = embeds.rows(block * self.block_size, (block + 1) * self.block_size)
                content = b"".join((content, rows, embeds.dtype.encode()))
            hashes.append(chain_hash(hashes[-1], content))
            yield hashes[-1]

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
