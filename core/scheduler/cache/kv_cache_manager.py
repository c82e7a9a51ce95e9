"""Which blocks of the KV cache running requests have, and which filled blocks later requests find.

A block can be found by other requests from the moment at which the step that fills it is scheduled. A request of the
same step may therefore build on blocks that rows before it are about to fill. Requests with a common beginning compute
it once, even if they arrive together. This relies on an invariant of every model: each layer writes the keys and values
of all rows of a step before it attends for any of them.
"""

from collections.abc import Iterator
from itertools import islice, takewhile
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_mp.core.scheduler.batch import NEVER_REGISTERS, Batch, Mask, Rows
from vllm_mp.core.scheduler.cache.block_pool import BlockPool, chain_hash
from vllm_mp.core.scheduler.cache.prefix_reader import PrefixReader
from vllm_mp.core.scheduler.cache.seal_table import NO_TOKEN, SealTable
from vllm_mp.core.scheduler.request import Request
from vllm_mp.core.scheduler.step import PendingStep, RepeatedStep

_MAX_READ_BLOCKS: Final = 256
"""Number of blocks that are looked up and read from the prefix cache file at a time."""


class CachedPrefix(NamedTuple):
    """The blocks that hold the beginning of a request."""

    blocks: list[int]
    num_tokens: int
    """Tokens in them. If these do not fill the last block, an earlier core has begun it, and it has no other user."""


class KVCacheManager:
    """Owns the block pool, and the columns `block_table`, `num_blocks` and `num_registered` of the batch.

    What the blocks hold is written to the `SealTable`, if there is one, when the step is complete that has computed it.
    """

    def __init__(
        self,
        batch: Batch,
        num_blocks: int,
        block_size: int,
        table: SealTable | None = None,
        file: PrefixReader | None = None,
    ) -> None:
        """`num_blocks` counts the padding block; `block_size` is in tokens. The entries of `table` can be found.

        `file` reads blocks of the prefix cache file; None: there is none.
        """
        self.pool = BlockPool(num_blocks, table)
        self.block_size = block_size
        self.num_recomputed_tokens = 0
        """Tokens of requests that continue from an earlier core which it had computed and this core computes again."""
        self._table = table
        self._file = file
        if table is not None:
            self.pool.adopt(table.found())
        self._batch = batch
        self.num_prompt_tokens = 0
        """Tokens of the prompts that have got blocks; without requests of an earlier core, which continue."""
        self.num_cached_tokens = 0
        """Tokens among them that the prefix cache held."""

    @property
    def num_blocks_from_file(self) -> int:
        """Number of blocks that were read from the prefix cache file."""
        return 0 if self._file is None else self._file.num_blocks_read

    def find_prefix(self, request: Request) -> CachedPrefix:
        """Return the cached blocks that hold the beginning of `request`, never its last token."""
        if not request.hashes or not request.reads_cache:
            return CachedPrefix([], 0)
        # The last token is always computed, because the next token is sampled from its logits.
        tokens, size = request.tokens[:-1], self.block_size
        blocks = self.pool.find(self._block_hashes(request, request.tokens, 0, len(tokens) // size))
        rest = tokens[len(blocks) * size :]
        begun, count = self.pool.find_begun(request.hashes[len(blocks)], rest)
        if not count or self._is_embedded(request, len(blocks)):
            return CachedPrefix(blocks, len(blocks) * size)
        return CachedPrefix([*blocks, begun], len(blocks) * size + count)

    def read_from_file(self, request: Request, found: CachedPrefix, seconds: float) -> tuple[CachedPrefix, bool]:
        """Read the blocks that follow those of `found` from the prefix cache file, for about this many seconds.

        `found` is what `find_prefix` has just returned, and the pool must have room for `request`. Return what
        `find_prefix` returns now, and whether there is more to read.
        """
        file, size = self._file, self.block_size
        if file is None or not request.hashes or not request.reads_cache:
            return found, False
        num_found, num_full = found.num_tokens // size, (len(request.tokens) - 1) // size
        hashes = self._block_hashes(request, request.tokens, num_found, num_full)
        wanted = list(islice(takewhile(file.has, hashes), _MAX_READ_BLOCKS))
        if not wanted:
            return found, False
        file.expect(wanted)
        until = file.clock() + seconds
        # All of them are in use until the end, so that none is allocated for the next.
        blocks = found.blocks[:num_found]
        self.pool.share(blocks)
        for index, digest in enumerate(wanted, num_found):
            [block] = self.pool.allocate(1).tolist()
            is_read = file.read(digest, block)
            if is_read:
                self.pool.register(block, digest)
                self._note_read(request, index, block)
                blocks.append(block)
            else:
                self.pool.free(np.array([block], np.int32))
            if not is_read or file.clock() >= until:
                break
        self.pool.free(np.array(blocks, np.int32))
        num_read = len(blocks) - num_found
        has_more = is_read and (num_read < len(wanted) or len(wanted) == _MAX_READ_BLOCKS)
        return CachedPrefix(blocks, len(blocks) * size), has_more

    def _note_read(self, request: Request, index: int, block: int) -> None:
        """Write to the table that `block` holds the block of `request` with this index."""
        table, size = self._table, self.block_size
        if table is None:
            return
        one = np.array([block], np.int32)
        table.begin_step()
        table.note_before(one, request.hashes[index : index + 1])
        table.note_full(one, request.hashes[index + 1 : index + 2])
        is_embedded = self._is_embedded(request, index)
        tokens = request.tokens[index * size : (index + 1) * size]
        table.note_tokens(one.repeat(size), np.arange(size), NO_TOKEN if is_embedded else tokens)
        table.seal(one, size)

    def has_room(self, request: Request, found: CachedPrefix, spare: int = 0) -> bool:
        """Return whether the pool has the blocks that `request` needs beside those of `found`, and `spare` more."""
        needed = self._blocks_for(len(request.tokens)) - len(found.blocks)
        return needed + spare <= self.pool.num_free - self.pool.num_free_among(found.blocks)

    def allocate(self, request: Request, found: CachedPrefix) -> npt.NDArray[np.int32]:
        """Return blocks [n] for all tokens of `request`, which must get them with its row.

        `found`, which has the first of them, is what `find_prefix` has just returned. The pool must have room.
        """
        if request.num_cached_tokens is None:
            is_new = len(request.tokens) == request.num_prompt_tokens
            # A replay may find blocks that it has computed itself, in an earlier core.
            request.num_cached_tokens = found.num_tokens if is_new and not request.is_replay else 0
            self.num_prompt_tokens += is_new * request.num_prompt_tokens
            self.num_cached_tokens += request.num_cached_tokens
            num_missing = len(request.tokens) - 1 - found.num_tokens
            # Some tokens that a grammar forced in the last complete step are known, but were not computed.
            if not is_new and (request.constrained is None or num_missing > self.block_size):
                self.num_recomputed_tokens += num_missing
        num_full, num_begun = divmod(found.num_tokens, self.block_size)
        if self._file is not None:
            self._file.note_used(request.hashes[1 : num_full + 1])
        self.pool.share(found.blocks[:num_full])
        if num_begun:
            self.pool.take_begun(found.blocks[num_full], num_begun)
        new = self.pool.allocate(self._blocks_for(len(request.tokens)) - len(found.blocks))
        return np.concatenate([np.array(found.blocks, np.int32), new])

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

    def extend(self, row: int, num_tokens: int, spare: int) -> None:
        """Give `row` blocks for its first `num_tokens` tokens, as long as more than `spare` blocks are free."""
        batch, held = self._batch, int(self._batch.num_blocks[row])
        count = min(self._blocks_for(num_tokens) - held, self.pool.num_free - spare)
        if count > 0:
            batch.block_table[row, held : held + count] = self.pool.allocate(count)
            batch.num_blocks[row] += count

    def register_decodes(self, rows: Rows, awaits: Rows) -> int:
        """Register the blocks of `rows` [n] that are full when one more token of each row is computed.

        `awaits` are indexes into `rows`. The last token of these rows is not known yet, so it counts for no block.
        Return in how many steps of the same rows after this step none of them begins or fills a block.
        """
        batch, size = self._batch, self.block_size
        num_tokens = batch.num_computed_tokens[rows] + 1
        if len(awaits):
            num_tokens[awaits] -= 1
        due = num_tokens // size > batch.num_registered[rows]
        if due.any():
            for row, count in zip(rows[due].tolist(), num_tokens[due].tolist(), strict=True):
                self.register(row, count)
        num_in_last = num_tokens % size
        # A row with 0 tokens in its last block has filled it, and one with `size - 1` fills it with the next token.
        return max(0, size - 1 - int(num_in_last.max(initial=0))) if num_in_last.all() else 0

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

    def note_computed(self, pending: PendingStep, failed: list[int]) -> None:
        """Write to the table what the blocks of the live rows of `pending`, which is complete, hold now.

        Nothing is written for the rows in `failed`, whose values are not finite.
        """
        table = self._table
        if table is None:
            return
        batch, step = self._batch, pending.step
        is_noted = pending.live & (batch.num_registered[step.rows] != NEVER_REGISTERS)
        if failed:
            is_noted &= ~np.isin(step.rows, failed)
        is_single = (step.counts == 1) & ~batch.has_embeds[step.rows]
        table.begin_step()
        self._note_single(table, step.rows[is_noted & is_single], pending.ends[is_noted & is_single])
        others = is_noted & ~is_single
        columns = (step.rows[others].tolist(), pending.ends[others].tolist(), step.counts[others].tolist())
        for row, end, count in zip(*columns, strict=True):
            self._note_range(table, row, end - count, end)

    def note_repeated(self, repeated: RepeatedStep, pending: PendingStep) -> None:
        """Do what `note_computed` does, for a step that was repeated."""
        table = self._table
        if table is None:
            return
        if not repeated.is_sealed:
            self.note_computed(pending, [])
            return
        table.begin_step()
        rows, last = repeated.step.rows, pending.ends - 1
        if repeated.is_quiet:
            repeated.offsets += 1
            table.note_tokens(repeated.blocks, repeated.offsets, self._batch.token_ids[rows, last])
            table.seal(repeated.blocks, repeated.offsets + 1)
        else:
            indices, repeated.offsets = np.divmod(last, self.block_size)
            repeated.blocks = self._batch.block_table[rows, indices]
            self._note_single(table, rows, pending.ends)

    def _note_single(self, table: SealTable, rows: Rows, ends: Rows) -> None:
        """Write the last of the first `ends` [n] tokens of `rows` [n] to `table`."""
        batch, last = self._batch, ends - 1
        indices, offsets = last // self.block_size, last % self.block_size
        blocks = batch.block_table[rows, indices]
        table.note_tokens(blocks, offsets, batch.token_ids[rows, last])
        is_first, is_last = offsets == 0, offsets == self.block_size - 1
        if is_first.any():
            table.note_before(blocks[is_first], self._hashes_of(rows[is_first], indices[is_first]))
        if is_last.any():
            table.note_full(blocks[is_last], self._hashes_of(rows[is_last], indices[is_last] + 1))
        table.seal(blocks, offsets + 1)

    def _note_range(self, table: SealTable, row: int, start: int, end: int) -> None:
        """Write the tokens from `start` to `end` of `row` to `table`."""
        batch, size, request = self._batch, self.block_size, self._batch.request(row)
        positions = np.arange(start, end)
        blocks = batch.block_table[row]
        first_begun, num_full = -(-start // size), end // size
        self._extend_hashes(request, batch.token_ids[row], num_full)
        table.note_before(blocks[first_begun : -(-end // size)], request.hashes[first_begun : -(-end // size)])
        table.note_full(blocks[start // size : num_full], request.hashes[start // size + 1 : num_full + 1])
        indices = np.arange(start // size, -(-end // size))
        counts = np.minimum(end - indices * size, size)
        tokens = batch.token_ids[row, start:end]
        if batch.has_embeds[row]:
            # Only the hash of a full block describes embeddings.
            is_embedded = np.array([self._is_embedded(request, index) for index in indices.tolist()])
            tokens = np.where(is_embedded[positions // size - indices[0]], NO_TOKEN, tokens)
            is_sealed = ~is_embedded | (counts == size)
            indices, counts = indices[is_sealed], counts[is_sealed]
        table.note_tokens(blocks[positions // size], positions % size, tokens)
        table.seal(blocks[indices], counts)

    def _hashes_of(self, rows: Rows, counts: Rows) -> list[bytes]:
        """Return the hashes of the first `counts` [n] blocks of `rows` [n], 0 blocks having the root hash."""
        hashes = []
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            request = self._batch.request(row)
            self._extend_hashes(request, self._batch.token_ids[row], count)
            hashes.append(request.hashes[count])
        return hashes

    def _extend_hashes(self, request: Request, tokens: npt.NDArray[np.int32], count: int) -> None:
        """Compute the hashes of the first `count` blocks of `request`, as far as they are missing."""
        for _ in self._block_hashes(request, tokens, count, count):
            pass

    def _is_embedded(self, request: Request, block: int) -> bool:
        """Return whether the block with this index holds tokens that are given as embeddings."""
        if request.images is not None:
            return request.images.overlaps(block * self.block_size, (block + 1) * self.block_size)
        return request.prompt_embeds is not None and block * self.block_size < request.prompt_embeds.num_tokens

    def forget_prefixes(self, keeps_file: bool = False) -> None:
        """Stop filled blocks from being found, and later blocks of the running requests, which build on them.

        With `keeps_file` those in the prefix cache file can still be read.
        """
        self.pool.forget_all()
        if self._file is not None and not keeps_file:
            self._file.clear()
        self._batch.num_registered[self._batch.order] = NEVER_REGISTERS
        self._batch.num_changes += 1

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
            if embeds is not None and self._is_embedded(request, block):
                # Longer than the ids of any block, as with an image, so no prompt of tokens has this hash.
                rows = embeds.rows(block * self.block_size, (block + 1) * self.block_size)
                content = b"".join((content, rows, embeds.dtype.encode()))
            elif request.images is not None:
                content += request.images.content(block * self.block_size, (block + 1) * self.block_size)
            hashes.append(chain_hash(hashes[-1], content))
            yield hashes[-1]

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
