"""Rows and blocks for requests: how they are found, made by preempting other requests, and taken back."""

from vllm_mp.core.scheduler.batch import Batch, Mask
from vllm_mp.core.scheduler.cache.kv_cache_manager import CachedPrefix, KVCacheManager
from vllm_mp.core.scheduler.preemption import next_to_preempt
from vllm_mp.core.scheduler.request import Request
from vllm_mp.core.scheduler.step import PendingSteps
from vllm_mp.core.scheduler.waiting.waiting_queue import WaitingQueue


class Room:
    """Finds and makes room for requests in the batch, the cache and the adapter slots.

    A preempted request gives up its row and its blocks, and waits again. No request is preempted while a step is
    pending: the tokens of the step would be lost.
    """

    def __init__(self, batch: Batch, cache: KVCacheManager, waiting: WaitingQueue, pending_steps: PendingSteps) -> None:
        self._batch = batch
        self._cache = cache
        self._waiting = waiting
        self._adapters = waiting.adapters
        self._pending_steps = pending_steps
        self.num_preemptions = 0
        self._refused: tuple[tuple[int, int], int] | None = None
        """(order of the next request, `pool.num_returned`) when that request last had no room."""

    def find(self, request: Request) -> CachedPrefix | None:
        """Return the cached blocks of `request`'s prefix; None if no row is free, or too few blocks are."""
        batch, cache = self._batch, self._cache
        if batch.is_full or self._refused == (request.order, cache.pool.num_returned):
            return None  # Looking up its prefix in every step would make steps as long as prompts.
        # A block for each row that grows stays free, or the next few tokens would preempt the request admitted now.
        num_growing = int((~batch.is_pooled[batch.order]).sum())
        found = cache.find_prefix(request)
        if len(batch) and not cache.has_room(request, found, num_growing):
            self._refused = (request.order, cache.pool.num_returned)
            return None
        return found

    def make(self, suspect: Request) -> CachedPrefix | None:
        """Preempt requests that are not isolated until there is room for `suspect`; return as `find` does."""
        batch, cache = self._batch, self._cache
        if self._adapters is not None and not self._adapters.make_slot(suspect, batch, self.preempt):
            return None
        found = cache.find_prefix(suspect)
        while batch.is_full or not cache.has_room(suspect, found):
            if batch.is_isolated[batch.order].all():
                return None
            self._preempt_next(batch.is_isolated)
        return found

    def give_blocks_to_growing_rows(self, excluded: Mask | None = None, spared: Mask | None = None) -> bool:
        """Give a block to every row whose last token needs it; preempt requests if blocks run out.

        Rows in `excluded` [max_num_seqs] need no block. `spared` is as for `_preempt_next`. Return False, and change
        nothing, if a request would have to be preempted while a step is pending: processing that step may free blocks.
        """
        while len(growing := self._cache.growing_rows(excluded)):
            if len(growing) <= self._cache.pool.num_free:
                self._cache.grow(growing)  # by one block each, so a row with several new tokens may need another turn
            elif self._pending_steps:
                return False
            else:
                self._preempt_next(spared)
        return True

    def preempt_all(self) -> None:
        """Preempt every running request."""
        for row in self._batch.order[::-1].tolist():
            self.preempt(self._batch.request(row))

    def preempt(self, request: Request) -> None:
        """Put a running request back into the waiting queue; raise RuntimeError while a step is pending."""
        if self._pending_steps:
            raise RuntimeError("a request must not be preempted while a step is pending: its tokens would be lost")
        self.vacate(request)
        self.num_preemptions += 1
        self._waiting.add(request, may_hold=False)

    def vacate(self, request: Request) -> None:
        """Take the row and the blocks of a running request."""
        self._pending_steps.leave(request)
        if self._adapters is not None:
            self._adapters.note_vacancy(request)
        self._waiting.turns.count(request, int(self._batch.num_tokens[request.row]) - len(request.tokens))
        self._cache.remove_row(request.row)

    def _preempt_next(self, spared: Mask | None = None) -> None:
        """Preempt a running request; if possible none in `spared` [max_num_seqs]."""
        rows = self._batch.order
        others = rows if spared is None else rows[~spared[rows]]
        self.preempt(next_to_preempt(self._batch, others if len(others) else rows))
