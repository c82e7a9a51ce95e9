"""Policies that choose a core for a request. Each front has a policy of its own, which knows what that front has sent.

`RouterPolicy` is the router of the client. `RoundRobin` and `LeastRequests` are what load balancers do. `Oracle`, in
`oracle.py`, knows everything.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from vllm_mp.client.cores.router import CHUNK_TOKENS, RoutedRequest, Router
from vllm_mp.testing.cluster.job import Job


class Policy(Protocol):
    """Chooses cores, and is told what happens to the requests of its front."""

    def choose(self, job: Job, cores: Sequence[int], now: float) -> int:
        """Return one of `cores`, those that serve."""

    def note_sent(self, job: Job) -> None:
        """Note that `job` was sent to `job.core`."""

    def note_read(self, job: Job) -> None:
        """Note that the first token has arrived from `job.core`."""

    def note_left(self, job: Job) -> None:
        """Note that `job` has ended on `job.core`, or left it."""

    def note_death(self, core: int) -> None:
        """Note that a core has died, before its requests leave it."""


class RouterPolicy:
    """The router that each client of several cores has."""

    def __init__(
        self, num_cores: int, cache_tokens: int, running_cost: float, full_cost: float, seed: int | None
    ) -> None:
        self._router = Router(running_cost=running_cost, full_cost=full_cost, seed=seed)
        for core in range(num_cores):
            self._router.add_core(core, cache_tokens)
        self._latest: tuple[Job, RoutedRequest] | None = None

    def choose(self, job: Job, cores: Sequence[int], now: float) -> int:
        request = _routed(job)
        self._latest = job, request
        return self._router.choose(request, cores)

    def note_sent(self, job: Job) -> None:
        latest = self._latest
        request = latest[1] if latest is not None and latest[0] is job else _routed(job)
        job.placement = self._router.place(request, job.core)

    def note_read(self, job: Job) -> None:
        assert job.placement is not None
        self._router.note_read(job.placement)

    def note_left(self, job: Job) -> None:
        assert job.placement is not None
        self._router.note_end(job.placement, job.was_read)
        job.placement = None

    def note_death(self, core: int) -> None:
        self._router.forget_prefixes(core)


def _routed(job: Job) -> RoutedRequest:
    """Return what a client tells its router: the hashes of the prompt alone."""
    return RoutedRequest(job.num_known, 1, job.request.hashes[: job.request.num_prompt // CHUNK_TOKENS])


class RoundRobin:
    """Sends each request to the next core."""

    def __init__(self, first: int) -> None:
        self._next = first

    def choose(self, job: Job, cores: Sequence[int], now: float) -> int:
        self._next += 1
        return cores[self._next % len(cores)]

    def note_sent(self, job: Job) -> None: ...

    def note_read(self, job: Job) -> None: ...

    def note_left(self, job: Job) -> None: ...

    def note_death(self, core: int) -> None: ...


class LeastRequests:
    """Sends each request to the core with the fewest live requests of this front; of equals, the one sent fewest.

    Of these it chooses the first in an order that is drawn from `seed`, or with None in the order of their numbers.
    """

    def __init__(self, num_cores: int, seed: int | None) -> None:
        self._num_live = np.zeros(num_cores, np.int64)
        self._num_sent = np.zeros(num_cores, np.int64)
        self._turns = np.arange(num_cores) if seed is None else np.random.default_rng(seed).permutation(num_cores)

    def choose(self, job: Job, cores: Sequence[int], now: float) -> int:
        chosen = np.asarray(cores)
        return int(chosen[np.lexsort((self._turns[chosen], self._num_sent[chosen], self._num_live[chosen]))[0]])

    def note_sent(self, job: Job) -> None:
        self._num_live[job.core] += 1
        self._num_sent[job.core] += 1

    def note_read(self, job: Job) -> None: ...

    def note_left(self, job: Job) -> None:
        self._num_live[job.core] -= 1

    def note_death(self, core: int) -> None: ...
