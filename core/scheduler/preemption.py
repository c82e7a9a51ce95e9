"""Which running request gives up its blocks when the KV cache runs out of them."""

import bisect

import numpy as np

from vllm_mp.core.scheduler.batch import Batch, Rows
from vllm_mp.core.scheduler.request import Request


def next_to_preempt(batch: Batch, rows: Rows) -> Request:
    """Return the request in `rows` [n] of `batch`, which are in order, to preempt.

    Among the requests with the highest priority number it is the newest of a client: of the client that has most blocks
    left without it. So the only request of a client is preempted after requests of clients with several, and the first
    request in order runs to its end.
    """
    last = batch.request(int(rows[-1]))
    if (batch.client[rows] == last.client).all():
        return last
    clients, which = np.unique(batch.client[rows], return_inverse=True)
    num_left = np.bincount(which, weights=batch.num_blocks[rows])
    lowest = bisect.bisect_left(rows.tolist(), last.order[0], key=lambda row: batch.request(row).order[0])
    newest = np.full(len(clients), -1)
    newest[which[lowest:]] = np.arange(lowest, len(rows))  # of equal indices the last is kept
    candidates = np.flatnonzero(newest >= 0)
    num_left[candidates] -= batch.num_blocks[rows[newest[candidates]]]
    chosen = max(candidates.tolist(), key=lambda client: (num_left[client], newest[client]))
    return batch.request(int(rows[newest[chosen]]))
