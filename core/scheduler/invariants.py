"""What must hold between two steps, also with one in flight, whatever has happened before."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from vllm_mp.core.scheduler.batch import Batch
from vllm_mp.core.scheduler.block_pool import BlockPool
from vllm_mp.core.scheduler.request import NO_ROW, Request
from vllm_mp.core.scheduler.scheduler import Scheduler


class InvariantError(RuntimeError):
    """The scheduler's books contradict each other: the engine has a bug."""


def check_invariants(scheduler: Scheduler) -> None:
    """See to it that no request, row or block is lost or used twice.

    Raises InvariantError, which names the broken invariant and who breaks it. Takes time in proportion to the cache.
    """
    _check_requests(scheduler)
    _check_rows(scheduler.batch)
    _check_counters(scheduler)
    _check_pool(scheduler.pool)
    _check_block_users(scheduler)
    _check_hashes(scheduler)


def _check_requests(scheduler: Scheduler) -> None:
    batch = scheduler.batch
    running = [_name(batch.request(row)) for row in batch.order.tolist()]
    waiting = [_name(request) for _, request in scheduler._waiting if not request.aborted]
    held = list(scheduler._held)
    places = [*running, *waiting, *held]
    _require("a live request has one place: a row, or in line, or held back", _repeated(places))
    _require("what has a place is live", set(places) - set(scheduler._requests))
    _require("a live request has a place", set(scheduler._requests) - set(places))
    _require(
        "a request is found under its own client and slot",
        [name for name, request in [*scheduler._requests.items(), *scheduler._held.items()] if _name(request) != name],
    )
    _require(
        "a request that waits has no row",
        [name for name in [*waiting, *held] if scheduler._requests[name].row != NO_ROW],
    )
    suspects = [request for row in batch.order.tolist() if (request := batch.request(row)).isolate_until_num_tokens]
    turn = [] if scheduler._suspect is None else [scheduler._suspect]
    _require("a suspect runs exactly if it is its turn", [_name(one) for one in suspects] if suspects != turn else [])
    _require("the waiting are counted", [scheduler._num_waiting] if scheduler._num_waiting != len(waiting) else [])
    counted, used = scheduler.memory._used, Counter[int]()
    for request in scheduler._requests.values():
        used[request.client] += request.num_bytes
    _require("what a client's requests take is counted", [one for one in used | counted if used[one] != counted[one]])
    _require("only a paused scheduler holds requests back", [] if scheduler.is_paused else held)
    _require("nothing runs in a scheduler that sleeps", running if scheduler._is_asleep else [])
    _require("only a paused scheduler is frozen", [True] if scheduler._is_frozen and not scheduler.is_paused else [])


def _check_rows(batch: Batch) -> None:
    rows, num_rows = batch.order.tolist(), len(batch.requests)
    _require("every row is either in use or free, once", _repeated([*rows, *batch._free_rows]))
    _require("no row is lost", set(range(num_rows)) ^ {*rows, *batch._free_rows})
    _require("a free row has no request", [row for row in batch._free_rows if batch.requests[row] is not None])
    requests = [batch.request(row) for row in rows]
    _require("a request knows its row", [row for row, one in zip(rows, requests, strict=True) if one.row != row])
    names = zip(batch.client[rows].tolist(), batch.slot[rows].tolist(), strict=True)
    _require("a row knows its request", [name for name, one in zip(names, requests, strict=True) if _name(one) != name])
    orders = [request.order for request in requests]
    _require("rows are in the order of their requests", orders if orders != sorted(orders) else [])


def _check_counters(scheduler: Scheduler) -> None:
    batch, size = scheduler.batch, scheduler.block_size
    rows = batch.order
    tokens, computed, blocks = batch.num_tokens[rows], batch.num_computed_tokens[rows], batch.num_blocks[rows]
    _require("the prompt is among the known tokens", rows[tokens < batch.num_prompt_tokens[rows]])
    _require("no request is longer than it may get", rows[tokens > batch.max_total_tokens[rows]])
    is_in_flight = scheduler.is_in_flight()
    is_done = (computed == tokens) & batch.is_pooled[rows] & is_in_flight[rows]
    _require(
        "the last token is not computed, but where it is pooled in flight",
        rows[(computed < 0) | (computed >= tokens) & ~is_done],
    )
    awaited = np.flatnonzero(scheduler.is_awaited())
    _require("steps in flight are of rows in use", set(np.flatnonzero(is_in_flight).tolist()) - set(rows.tolist()))
    _require(
        "a token that is awaited is the last one",
        awaited[batch.num_computed_tokens[awaited] != batch.num_tokens[awaited] - 1],
    )
    _require("what is computed lies in blocks", rows[computed > blocks * size])
    _require("no block is held in advance", rows[blocks > -(-tokens // size)])


def _check_pool(pool: BlockPool) -> None:
    users = pool._num_users
    _require("no block has fewer users than none", np.flatnonzero(users < 0))
    _require("the padding block is nobody's", [0] if users[0] or 0 in pool._free or 0 in pool._hash_of else [])
    unused = set((np.flatnonzero(users[1:] == 0) + 1).tolist())
    _require("a block is free exactly if it has no user", unused ^ set(pool._free))
    _require(
        "a block and its hash lead to each other",
        {*pool._hash_of.items()} ^ {(block, digest) for digest, block in pool._block_of.items()},
    )


def _check_block_users(scheduler: Scheduler) -> None:
    batch, pool = scheduler.batch, scheduler.pool
    users = np.zeros_like(pool._num_users)
    for row in batch.order.tolist():
        blocks = batch.block_table[row, : batch.num_blocks[row]]
        _require(f"row {row} has each block once", _repeated(blocks.tolist()))
        _require(f"row {row} has no padding among its blocks", np.flatnonzero(blocks == 0))
        _require(f"row {row} has no block beyond its count", np.flatnonzero(batch.block_table[row, len(blocks) :]))
        users[blocks] += 1
    _require("the users of a block are the rows that have it", np.flatnonzero(users != pool._num_users))
    for row in batch.order.tolist():
        written = batch.block_table[row, batch.num_computed_tokens[row] // scheduler.block_size : batch.num_blocks[row]]
        _require(f"what row {row} will write has no other user", written[users[written] != 1])


def _check_hashes(scheduler: Scheduler) -> None:
    """What is found under a hash is what the request that has it there has computed."""
    batch, pool = scheduler.batch, scheduler.pool
    is_awaited = scheduler.is_awaited()
    for row in batch.order.tolist():
        hashes, num_full = batch.request(row).hashes, int(batch.num_computed_tokens[row]) // scheduler.block_size
        for place, block in enumerate(batch.block_table[row, : batch.num_blocks[row]].tolist()):
            digest = pool._hash_of.get(block)
            is_right = place < num_full and hashes[place + 1 : place + 2] == [digest]
            _require(
                f"block {block} is found under the hash of row {row} at place {place}, of computed tokens",
                [] if digest is None or is_right else [digest],
            )
            known = batch.num_tokens[row] - int(is_awaited[row])
            _require(
                f"block {block} of row {row} is found by tokens that are known",
                [] if digest is None or (place + 1) * scheduler.block_size <= known else [digest],
            )


def _require(invariant: str, offenders: Iterable[Any]) -> None:
    broken = offenders.tolist() if isinstance(offenders, np.ndarray) else list(offenders)
    if broken:
        raise InvariantError(f"{invariant}; broken by {broken[:10]}{' and others' if len(broken) > 10 else ''}")


def _repeated(items: list[Any]) -> list[Any]:
    return [item for item, count in Counter(items).items() if count > 1]


def _name(request: Request) -> tuple[int, int]:
    return request.client, request.slot
