"""A policy that knows the true state of every core, and how long every answer will be.

It chooses the core with the lowest sum of three times: until the request's first token; by which its reading delays the
completions that run there, weighted; and of its reading, weighted by the requests that wait at a core on average, for
requests that come later. It does not know these, so it is no bound: another policy may beat it in one of the figures.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_mp.client.cores.router import CHUNK_TOKENS
from vllm_mp.testing.cluster.core import SimulatedCore
from vllm_mp.testing.cluster.job import Job
from vllm_mp.testing.cluster.prefix_cache import Holders

_NUM_CANDIDATES = 16
"""Cores whose wait for room is computed, those that are best without that wait."""

_DELAY_WEIGHT, _LATER_WEIGHT = 0.3, 0.5
"""The best of eight pairs that were tried: first tokens are soonest with caches that hold much and with full cores."""


class CoreTable:
    """What the oracle reads of all cores at once; each array has an entry for each core."""

    def __init__(self, cores: Sequence[SimulatedCore]) -> None:
        self._cores = cores
        self.unread, self.rows, self.context, self.wanted, self.waiting = np.zeros((5, len(cores)))
        self.busy_until = np.zeros(len(cores))

    def update(self, core: SimulatedCore) -> None:
        """Read the state of a core again."""
        number, waiting = core.number, core.waiting
        self.unread[number] = core.num_unread
        self.rows[number] = len(core.decodes) + len(waiting)
        self.context[number] = core.context
        self.waiting[number] = len(waiting)
        self.wanted[number] = core.in_use + sum(job.num_counted for job in waiting)
        segment = core.segment
        self.busy_until[number] = 0.0 if segment is None or segment.num_steps > 1 else segment.end


class Oracle:
    """Shared by all fronts."""

    def __init__(self, cores: Sequence[SimulatedCore], holders: Holders) -> None:
        self._cores, self._holders = cores, holders
        self._table = CoreTable(cores)
        self._changed: set[int] = set()

    def note_change(self, core: int) -> None:
        """Note that the state of a core may have changed."""
        self._changed.add(core)

    def choose(self, job: Job, cores: Sequence[int], now: float) -> int:
        for core in self._changed:
            self._table.update(self._cores[core])
        self._changed.clear()
        own = np.full(len(self._cores), float(job.num_known))
        limit = (job.num_known - 1) // CHUNK_TOKENS
        for core, count in self._holders.hits(job.request.hashes[:limit]).items():
            own[core] -= CHUNK_TOKENS * count
        serving = np.asarray(cores)
        cost = self._added_seconds(job, own, now)[serving]
        missing = (self._table.wanted + own)[serving] - self._cores[0].limits.cache_tokens
        order = np.argsort(cost, kind="stable")[:_NUM_CANDIDATES].tolist()
        best, best_cost = -1, float("inf")
        for index in order:
            if cost[index] >= best_cost:
                break
            core = int(serving[index])
            total = cost[index] + (self._seconds_until_free(core, missing[index]) if missing[index] > 0 else 0.0)
            if total < best_cost:
                best, best_cost = core, total
        return best

    def _added_seconds(self, job: Job, own: npt.NDArray[np.float64], now: float) -> npt.NDArray[np.float64]:
        """Return the seconds that `job`, with `own` tokens to read, costs on each core if that has room for it."""
        table, model, limits = self._table, self._cores[0].model, self._cores[0].limits
        step = model.base + table.rows * model.row + table.context * model.context
        later = _LATER_WEIGHT + table.waiting.mean()
        reading = own * model.read + own * (job.num_known - own / 2) * model.pair
        num_steps = np.ceil((table.unread + own) / np.maximum(1, limits.max_num_batched_tokens - table.rows))
        wait = np.maximum(0.0, table.busy_until - now) + table.unread * model.read + num_steps * step
        cost: npt.NDArray[np.float64] = wait + reading * (1 + later + _DELAY_WEIGHT * table.rows)
        return cost

    def _seconds_until_free(self, number: int, missing: float) -> float:
        """Return the seconds until completions have ended that hold `missing` tokens."""
        core = self._cores[number]
        rows = len(core.decodes)
        num_steps = 1
        for num_steps, job in core.next_ends():
            missing -= job.num_private + job.request.num_output
            if missing <= 0:
                return core.model.decode_seconds(num_steps, rows, core.context)
        # Requests that wait now hold the rest: about as long again for as many tokens.
        return core.model.decode_seconds(num_steps, rows, core.context) * (
            1 + missing / self._cores[0].limits.cache_tokens
        )

    def note_sent(self, job: Job) -> None: ...

    def note_read(self, job: Job) -> None: ...

    def note_left(self, job: Job) -> None: ...

    def note_death(self, core: int) -> None: ...
