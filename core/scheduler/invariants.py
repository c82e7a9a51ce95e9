"""The invariants of the scheduler between two steps, whether or not a step is pending."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from vllm_mp.core.lora.cached_adapter import NO_SLOT
from vllm_mp.core.scheduler.batch import NO_ROWS, Batch
from vllm_mp.core.scheduler.cache.block_pool import BlockPool
from vllm_mp.core.scheduler.request import NO_ROW, Line
from vllm_mp.core.scheduler.scheduler import Scheduler


class InvariantError(RuntimeError):
    """The records of the scheduler contradict each other, because the engine has a bug."""


def check_invariants(scheduler: Scheduler) -> None:
    """Check that no request, row or block is lost or used twice.

    Raises InvariantError, which names the broken invariant and the keys, rows or blocks that break it. The check takes
    time in proportion to the size of the cache.
    """
    _check_requests(scheduler)
    _check_rows(scheduler.batch)
    _check_adapters(scheduler)
    _check_counters(scheduler)
    _check_pending_steps(scheduler)
    _check_pool(scheduler.cache.pool)
    _check_block_users(scheduler)
    _check_hashes(scheduler)


def _check_requests(scheduler: Scheduler) -> None:
    batch, queue = scheduler.batch, scheduler.waiting
    running = [batch.request(row).key for row in batch.order.tolist()]
    queued, suspects = queue.turns.requests(), queue.isolated.requests()
    waiting = [request.key for request in queued + suspects]
    held = list(queue._held)
    parked = [] if queue.adapters is None else [request.key for request in queue.adapters.parked.all()]
    parked += queue._uncompiled
    encoded = [request for request in queue.images.requests() if not request.isolate_until_num_tokens]
    found = [*running, *waiting, *held, *parked, *(request.key for request in encoded)]
    _require(
        "a live request is found once: in a row, the waiting queue, parked, held back, or waiting for its images",
        _repeated(found),
    )
    _require(
        "a suspect that waits for its images waits with its group",
        {request.key for request in queue.images.requests()} - {request.key for request in [*encoded, *suspects]},
    )
    num_encoded = len(queue.images.requests())
    is_counted = (len(queue.images), queue.num_without_embeddings) == (num_encoded, len(encoded))
    _require("requests that wait for their images are counted", [] if is_counted else [num_encoded])
    _require("parked requests are counted", [] if len(parked) == queue.num_parked else [queue.num_parked])
    _require("a request that is found is live", set(found) - set(scheduler._requests))
    _require("a live request is found", set(scheduler._requests) - set(found))
    _require(
        "a request is found under its own client and slot",
        [key for key, request in [*scheduler._requests.items(), *queue._held.items()] if request.key != key],
    )
    _require("a waiting request has no row", [key for key in waiting + held if scheduler._requests[key].row != NO_ROW])
    _require("a suspect waits with its group", [request.key for request in queued if request.isolate_until_num_tokens])
    _require(
        "a request that waits with a group is a suspect",
        [request.key for request in suspects if not request.isolate_until_num_tokens],
    )
    running_suspects = [
        request for row in batch.order.tolist() if (request := batch.request(row)).isolate_until_num_tokens
    ]
    _require(
        "a suspect has a row only while its group runs",
        [suspect.key for suspect in running_suspects if suspect.isolation != scheduler.isolation.group],
    )
    _require(
        "the rows of suspects are isolated",
        {suspect.row for suspect in running_suspects} ^ set(np.flatnonzero(batch.is_isolated).tolist()),
    )
    _require("waiting requests are counted", [len(queue)] if len(queue) != len(waiting) else [])
    counted, used = scheduler.memory._used, Counter[Line]()
    for request in scheduler._requests.values():
        used[request.line] += request.num_bytes
    for line, images in scheduler.memory._images.items():
        used[line] += sum(held.num_bytes for held in images.values())
    _require("the bytes of each client are counted", [line for line in used | counted if used[line] != counted[line]])
    _require("only a paused scheduler holds requests back", [] if scheduler.is_paused else held)
    _require("no request has a row while the scheduler sleeps", running if scheduler._is_asleep else [])
    _require("only a paused scheduler is frozen", [True] if scheduler._is_frozen and not scheduler.is_paused else [])


def _check_rows(batch: Batch) -> None:
    rows, num_rows = batch.order.tolist(), len(batch.requests)
    _require("every row is either in use or free, once", _repeated([*rows, *batch._free_rows]))
    _require("no row is lost", set(range(num_rows)) ^ {*rows, *batch._free_rows})
    _require("a free row has no request", [row for row in batch._free_rows if batch.requests[row] is not None])
    requests = [batch.request(row) for row in rows]
    _require(
        "a request knows its row", [row for row, request in zip(rows, requests, strict=True) if request.row != row]
    )
    keys = zip(batch.client[rows].tolist(), batch.slot[rows].tolist(), strict=True)
    _require("a row knows its request", [key for key, other in zip(keys, requests, strict=True) if other.key != key])
    orders = [request.order for request in requests]
    _require("rows are in the order of their requests", orders if orders != sorted(orders) else [])


def _check_adapters(scheduler: Scheduler) -> None:
    batch = scheduler.batch
    rows = batch.order.tolist()
    by_row = {row: batch.request(row).adapter for row in rows}
    slots = {row: NO_SLOT if adapter is None else adapter.slot for row, adapter in by_row.items()}
    _require("a row has the slot of its adapter", [row for row in rows if batch.adapter_slot[row] != slots[row]])
    _require("a running request has its adapter in a slot", [row for row in rows if by_row[row] and slots[row] < 0])
    holders = [] if scheduler.adapters is None else scheduler.adapters.holders
    _require("a slot has one adapter", _repeated([holder.slot for holder in holders]))
    if scheduler.adapters is not None:
        selected = scheduler.adapters.selected
        idle = [str(adapter) for adapter in selected if not scheduler.adapters.parked.of(adapter)]
        _require("an adapter is selected for its parked requests", idle)
    used = Counter(adapter for adapter in by_row.values() if adapter is not None)
    adapters = {request.adapter for request in scheduler._requests.values() if request.adapter is not None}
    _require("only adapters with a slot run", [str(adapter) for adapter in used if adapter not in holders])
    _require(
        "the running requests of an adapter are counted",
        [str(adapter) for adapter in {*adapters, *holders} if adapter.num_rows != used[adapter]],
    )
    waiting = {request.key for request in scheduler.waiting.turns.requests() if request.adapter is not None}
    known = [] if scheduler.adapters is None else scheduler.adapters.waiting.all()
    _require("requests that wait for their turn have an adapter with a slot", waiting ^ {r.key for r in known})
    num_waiting = Counter(request.adapter for request in known)
    _require(
        "the waiting requests of an adapter are counted",
        [str(adapter) for adapter in {*adapters, *holders} if adapter.num_waiting != num_waiting[adapter]],
    )


def _check_counters(scheduler: Scheduler) -> None:
    batch, size = scheduler.batch, scheduler.cache.block_size
    rows = batch.order
    tokens, computed, blocks = batch.num_tokens[rows], batch.num_computed_tokens[rows], batch.num_blocks[rows]
    _require("the prompt is among the known tokens", rows[tokens < batch.num_prompt_tokens[rows]])
    _require("no request exceeds its length", rows[tokens > batch.max_total_tokens[rows]])
    is_pooled_now = (computed == tokens) & batch.is_pooled[rows] & scheduler.pending_steps.live_rows()[rows]
    _require(
        "the last token is not computed, except for a vector in a pending step",
        rows[(computed < 0) | (computed >= tokens) & ~is_pooled_now],
    )
    _require("computed tokens lie in blocks", rows[computed > blocks * size])
    most = 0 if scheduler.drafting is None else scheduler.drafting.max_drafts
    _require("no block is held in advance, except for drafts", rows[blocks > -(-(tokens + most) // size)])


def _check_pending_steps(scheduler: Scheduler) -> None:
    batch, pending_steps = scheduler.batch, scheduler.pending_steps
    rows_of_steps = [pending.step.rows[pending.live] for pending in pending_steps]
    live_rows = np.concatenate([NO_ROWS, *rows_of_steps])
    is_alone = len(rows_of_steps) <= 1 and batch.is_isolated[live_rows].all()
    _require(
        "a pending step of a group has no other rows, and no other step is pending with it",
        [] if is_alone else live_rows[batch.is_isolated[live_rows]],
    )
    numbers = [pending.number for pending in pending_steps]
    _require("pending steps are queued once, in their order", numbers if numbers != sorted(set(numbers)) else [])
    live = np.flatnonzero(pending_steps.live_rows())
    _require("the live rows of pending steps are in use", set(live.tolist()) - set(batch.order.tolist()))
    ends = np.zeros(len(batch.requests), np.int64)
    for pending in pending_steps:
        ends[pending.step.rows] = pending.ends
    _require("the tokens of pending steps count as computed", live[batch.num_computed_tokens[live] != ends[live]])
    awaited = np.flatnonzero(pending_steps.awaited_rows())
    _require(
        "an awaited token is the last of its row",
        awaited[batch.num_computed_tokens[awaited] != batch.num_tokens[awaited] - 1],
    )


def _check_pool(pool: BlockPool) -> None:
    users = pool._num_users
    _require("no block has fewer than 0 users", np.flatnonzero(users < 0))
    _require("the padding block is never used", [0] if users[0] or 0 in pool._free or 0 in pool._hash_of else [])
    unused = set((np.flatnonzero(users[1:] == 0) + 1).tolist())
    _require("a block is free exactly if it has no user", unused ^ set(pool._free))
    _require(
        "a block and its hash lead to each other",
        {*pool._hash_of.items()} ^ {(block, digest) for digest, block in pool._block_of.items()},
    )


def _check_block_users(scheduler: Scheduler) -> None:
    batch, size = scheduler.batch, scheduler.cache.block_size
    users = np.zeros_like(scheduler.cache.pool._num_users)
    for row in batch.order.tolist():
        blocks = batch.block_table[row, : batch.num_blocks[row]]
        _require(f"row {row} has each block once", _repeated(blocks.tolist()))
        _require(f"row {row} has no padding among its blocks", np.flatnonzero(blocks == 0))
        _require(f"row {row} has no block beyond its count", np.flatnonzero(batch.block_table[row, len(blocks) :]))
        users[blocks] += 1
    _require("the users of a block are the rows that have it", np.flatnonzero(users != scheduler.cache.pool._num_users))
    for row in batch.order.tolist():
        written = batch.block_table[row, batch.num_computed_tokens[row] // size : batch.num_blocks[row]]
        _require(f"blocks that row {row} will write have no other user", written[users[written] != 1])


def _check_hashes(scheduler: Scheduler) -> None:
    """Check that a registered block holds the computed tokens of its row that have its hash."""
    batch, pool, size = scheduler.batch, scheduler.cache.pool, scheduler.cache.block_size
    is_awaited = scheduler.pending_steps.awaited_rows()
    for row in batch.order.tolist():
        hashes, num_full = batch.request(row).hashes, int(batch.num_computed_tokens[row]) // size
        for index, block in enumerate(batch.block_table[row, : batch.num_blocks[row]].tolist()):
            digest = pool._hash_of.get(block)
            is_right = index < num_full and hashes[index + 1 : index + 2] == [digest]
            _require(
                f"block {block} is found under the hash of row {row} at index {index}, of computed tokens",
                [] if digest is None or is_right else [digest],
            )
            num_known = batch.num_tokens[row] - int(is_awaited[row])
            _require(
                f"block {block} of row {row} is found by tokens that are known",
                [] if digest is None or (index + 1) * size <= num_known else [digest],
            )


def _require(invariant: str, offenders: Iterable[Any]) -> None:
    """Raise InvariantError if there are `offenders`: keys, rows, blocks or numbers that break `invariant`."""
    broken = offenders.tolist() if isinstance(offenders, np.ndarray) else list(offenders)
    if broken:
        others = " and others" if len(broken) > 10 else ""
        raise InvariantError(f"{invariant}; broken by {broken[:10]}{others}; please report this bug of vllm_mp")


def _repeated(items: list[Any]) -> list[Any]:
    return [item for item, count in Counter(items).items() if count > 1]
