"""A discrete-event simulation of requests, fronts and cores. Its time is that of the model, in seconds."""

import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from vllm_mp.client.cores.router import FULL_COST, RUNNING_COST
from vllm_mp.testing.cluster.core import CoreLimits, SimulatedCore
from vllm_mp.testing.cluster.job import Job
from vllm_mp.testing.cluster.oracle import Oracle
from vllm_mp.testing.cluster.policies import LeastRequests, Policy, RoundRobin, RouterPolicy
from vllm_mp.testing.cluster.prefix_cache import Holders
from vllm_mp.testing.cluster.step_times import StepModel
from vllm_mp.testing.cluster.traces import TraceRequest

POLICIES = ("router", "round-robin", "least-requests", "oracle")


class ClusterOptions(NamedTuple):
    """What is simulated, beside the requests."""

    num_cores: int
    model: StepModel
    policy: str = "router"
    """One of `POLICIES`."""
    limits: CoreLimits = CoreLimits()
    num_fronts: int = 1
    """Clients, each with a policy of its own. A request goes to one of them at random."""
    chats_stay: bool = False
    """All requests of a chat go to the same front."""
    mean_life_s: float = 0.0
    """Mean seconds from the start of a core until it dies (exponential); 0: no core dies."""
    spreads_exposed: bool = False
    """Choose a core for each request that was in the step of a death; else one core gets all of them, because one of
    them may be to blame for the death."""
    running_cost: float = RUNNING_COST
    full_cost: float = FULL_COST
    """Constants of the router."""
    seed: int = 0


class Outcome(NamedTuple):
    """What became of the requests."""

    jobs: list[Job]
    cores: list[SimulatedCore]
    num_deaths: int
    num_moved: int
    """Requests that another core went on with."""
    num_dead: int
    """Tokens in the caches of cores that died, of live requests."""
    unfinished_s: float
    """Seconds of steps that deaths interrupted."""


class Cluster:
    """Runs requests to their ends."""

    def __init__(self, options: ClusterOptions) -> None:
        self._options = options
        holders = Holders()
        self.cores = [
            SimulatedCore(number, options.limits, options.model, holders) for number in range(options.num_cores)
        ]
        self._serving = list(range(options.num_cores))
        self._oracle = Oracle(self.cores, holders) if options.policy == "oracle" else None
        self._fronts = [self._front(number) for number in range(options.num_fronts)]
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()
        self._chance = np.random.default_rng(options.seed)
        self._stranded: list[Job] = []
        """Requests that came, or lost their core, while no core served."""
        self._num_live = 0
        self._outcome = Outcome([], self.cores, 0, 0, 0, 0.0)

    def _front(self, number: int) -> Policy:
        options = self._options
        if self._oracle is not None:
            return self._oracle
        # As in an engine, a client that is alone has no need of an order of its own.
        seed = options.seed * options.num_fronts + number if options.num_fronts > 1 else None
        if options.policy == "router":
            costs = options.running_cost, options.full_cost
            return RouterPolicy(options.num_cores, options.limits.cache_tokens, *costs, seed)
        if options.policy == "least-requests":
            return LeastRequests(options.num_cores, seed)
        if options.policy == "round-robin":
            return RoundRobin(number * options.num_cores // options.num_fronts)
        raise ValueError(f"policy={options.policy!r}: must be one of {', '.join(POLICIES)}")

    def run(self, requests: Sequence[TraceRequest]) -> Outcome:
        """Return what becomes of `requests`, which are in the order of their arrivals.

        Raises ValueError if one has more tokens than the cache of a core.
        """
        room = self._options.limits.cache_tokens
        fronts = np.random.default_rng(self._options.seed + 1).integers(len(self._fronts), size=len(requests)).tolist()
        jobs = []
        for number, request in enumerate(requests):
            if request.num_prompt + request.num_output > room:
                tokens = request.num_prompt + request.num_output
                raise ValueError(f"request {number} has {tokens} tokens, and a core has room for {room}; leave it out")
            front = request.chat % len(self._fronts) if self._options.chats_stay else fronts[number]
            jobs.append(Job(number, request, front))
        self._outcome = self._outcome._replace(jobs=jobs)
        self._num_live = len(jobs)
        if self._options.mean_life_s:
            for core in self.cores:
                self._draw_death(core, 0.0)
        arrivals = iter(jobs)
        arriving = next(arrivals, None)
        while self._num_live:
            if arriving is not None and (not self._events or arriving.request.arrival <= self._events[0][0]):
                self._send(arriving, arriving.request.arrival)
                arriving = next(arrivals, None)
            else:
                at, _, action = heapq.heappop(self._events)
                action(at)
        return self._outcome

    def plan_death(self, number: int, time: float) -> None:
        """Let a core die at `time`, beside the deaths that are drawn."""
        self._at(time, lambda now: self._die(self.cores[number], now))

    def _at(self, time: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), action))

    def _send(self, job: Job, now: float, core: int | None = None) -> None:
        """Send a request to `core`, or to the one that its front chooses."""
        if not self._serving:
            self._stranded.append(job)
            return
        front = self._fronts[job.front]
        chosen = self.cores[front.choose(job, self._serving, now) if core is None else core]
        is_idle = chosen.segment is None
        is_changed = chosen.submit(job, now)
        front.note_sent(job)
        if is_idle:
            self._begin(chosen, now)
        elif is_changed:
            self._expect_end(chosen)
        self._note_change(chosen)

    def _begin(self, core: SimulatedCore, now: float) -> None:
        if core.begin(now) is not None:
            self._expect_end(core)

    def _expect_end(self, core: SimulatedCore) -> None:
        assert core.segment is not None
        epoch = core.epoch

        def end(now: float) -> None:
            if core.epoch == epoch:
                self._end_segment(core, now)

        self._at(core.segment.end, end)

    def _end_segment(self, core: SimulatedCore, now: float) -> None:
        ended = core.end_segment()
        for job in ended.began:
            if job.first_token_s < 0:
                job.first_token_s = now
            if job.moved_s is not None:
                job.pauses.append(now - job.moved_s)
                job.moved_s = None
            self._fronts[job.front].note_read(job)
        for job in ended.finished:
            job.ended_s = now
            self._num_live -= 1
            self._fronts[job.front].note_left(job)
        self._begin(core, now)
        self._note_change(core)

    def _note_change(self, core: SimulatedCore) -> None:
        if self._oracle is not None:
            self._oracle.note_change(core.number)

    def _draw_death(self, core: SimulatedCore, now: float) -> None:
        self.plan_death(core.number, now + float(self._chance.exponential(self._options.mean_life_s)))

    def _die(self, core: SimulatedCore, now: float) -> None:
        if core.number not in self._serving:
            return
        self._serving.remove(core.number)
        wreck = core.die(now)
        for front in self._fronts:
            front.note_death(core.number)
        moved = wreck.in_step + wreck.others
        outcome = self._outcome
        self._outcome = outcome._replace(
            num_deaths=outcome.num_deaths + 1,
            num_moved=outcome.num_moved + len(moved),
            num_dead=outcome.num_dead + sum(job.num_lost for job in moved),
            unfinished_s=outcome.unfinished_s + wreck.unfinished_s,
        )
        self._note_change(core)
        self._at(now + self._options.limits.restart_s, lambda time: self._return(core, time))
        shelter: dict[int, int] = {}
        for job in moved:
            self._fronts[job.front].note_left(job)
        for job in wreck.in_step:
            if self._options.spreads_exposed:
                self._send(job, now)
            else:
                self._send(job, now, shelter.get(job.front))
                shelter[job.front] = job.core
        for job in wreck.others:
            self._send(job, now)

    def _return(self, core: SimulatedCore, now: float) -> None:
        self._serving = sorted([*self._serving, core.number])
        if self._options.mean_life_s:
            self._draw_death(core, now)
        stranded, self._stranded = self._stranded, []
        for job in stranded:
            self._send(job, now)
