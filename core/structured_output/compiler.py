"""Compiling of constraints beside the core's loop, and the cache of compiled grammars."""

import hashlib
import logging
import os
import queue
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

import msgspec

from vllm_mp.core.outside_work import OutsideWork
from vllm_mp.core.structured_output.compile_lanes import Job, Lane, Waiter, WaiterKey
from vllm_mp.core.structured_output.grammar import Grammar, GrammarError
from vllm_mp.core.structured_output.trial_compilation import Trial, TrialCompilation
from vllm_mp.core.structured_output.trial_process import TrialKilledError, TrialUnavailableError
from vllm_mp.core_link.status_page import DIGEST_BYTES, MAX_TRIED
from vllm_mp.requests.structured_outputs import Constraint, ConstraintKind

logger = logging.getLogger(__name__)

_MAX_PENDING = 1024
"""Number of constraints that may be compiled or wait, without those of replayed requests and `_SURE_PENDING`."""
_MAX_PENDING_OF_OWNER = 256
"""The same for those of one owner."""
_SURE_PENDING = 16
"""Number of constraints of an owner that are compiled however many others wait."""
_MAX_GRAMMARS = 512
_MAX_BYTES = 2**28
"""Host memory of the cached grammars, as they estimate it."""
_MAX_FAILURES = 512
_MAX_PLAIN: dict[ConstraintKind, int] = {"json_object": 0, "json": 4096, "regex": 256, "choice": 65_536}
"""Maximum length of a constraint that is plain, in characters; constraints of other kinds never are."""
_COSTLY_KEYWORDS = ('"pattern', '"allOf"', '"multipleOf"', '"x-guidance"')
"""Parts of schemas that are short and take long to compile."""
_FAILURE_S = 30.0
"""Time for which the error of a constraint is kept, so that repeated requests do not compile it again."""
_RETRY_S = 1.0
"""Time after which the trial of a replayed request's constraint is repeated, if it could not be made."""
_MAX_KILLED = 5
"""Number of trials of a replayed request's constraint that may be killed before the constraint counts as the reason."""


class TooManyConstraintsError(GrammarError):
    """The constraint is not at fault: too many others are being compiled."""


class NotCompiledError(GrammarError):
    """The constraint is not at fault: it cannot be compiled now."""


def grammar_key(constraint: Constraint) -> Constraint:
    """Return `constraint` without what its grammar does not depend on: where the constrained output begins."""
    if not constraint.starts_after:
        return constraint
    return msgspec.structs.replace(constraint, starts_after=(), reasoning_start=-1)


class Compiled(NamedTuple):
    """The end of a compilation."""

    constraint: Constraint
    """A `grammar_key`."""
    waiters: list[WaiterKey]
    """The requests that wait for it."""
    result: Grammar | GrammarError


class GrammarCompiler:
    """Owns the compiled grammars.

    Constraints are compiled by two threads, one for plain ones and one for those that may take long, so that plain ones
    never wait for the others. Each is tried outside of this process first, unless it is plain and an earlier core has
    compiled it after a trial; so the death of a core costs most constrained streams no trials. Owners take turns, and a
    compilation ends with the last request that waits for it. Everything else happens in the core's thread. `fd` is
    readable when a compilation has ended; `take_compiled` then returns its result.
    """

    def __init__(
        self,
        compilation: TrialCompilation,
        outside: OutsideWork | None = None,
        note_tried: Callable[[bytes], None] = lambda digest: None,
    ) -> None:
        """`outside` publishes what is compiled, and for which requests. `note_tried` is called with the digest of each
        constraint that a later core may compile without a trial.
        """
        self._compilation = compilation
        self._note_tried = note_tried
        self._tried: OrderedDict[bytes, None] = OrderedDict()
        """The digests of the constraints that need no trial, because they have passed one; oldest first."""
        self._outside = OutsideWork() if outside is None else outside
        self._slow = Lane(lambda job: self._compile(job, is_quick=False), self._refuse)
        self._quick = Lane(lambda job: self._compile(job, is_quick=True), self._refuse)
        self._grammars: OrderedDict[Constraint, Grammar] = OrderedDict()
        """The cached grammars, least recently used first."""
        self._num_bytes = 0
        self._failures: OrderedDict[Constraint, tuple[GrammarError, float]] = OrderedDict()
        """(error, time of `time.monotonic()` until which it is kept), oldest first."""
        self._jobs: dict[Constraint, Job] = {}
        self._job_of: dict[WaiterKey, Job] = {}
        self._jobs_of: defaultdict[Hashable, dict[Job, int]] = defaultdict(dict)
        """By owner, the jobs for which its requests wait, with the number of these requests."""
        self._ended: queue.SimpleQueue[tuple[Job, Grammar | GrammarError]] = queue.SimpleQueue()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def inherit(self, tried: Iterable[bytes]) -> None:
        """Compile the constraints whose digests an earlier core has noted without a trial."""
        for digest in tried:
            self._note_success(digest)

    def load(self) -> None:
        """Load what compiling needs, which the first request does otherwise; a core that serves would stall.

        It takes 0.3 s for a vocabulary of 49,000 tokens. If it fails, each constraint is refused.
        """
        self._compilation.load()

    def request(self, constraint: Constraint, waiter: Waiter) -> Grammar | None:
        """Return the grammar of a constraint; None while it is compiled. This call starts the compilation if necessary.

        After None, `waiter` waits until its key is among those of a `Compiled`, or until `forget`.

        Raises GrammarError if the constraint was refused in the last `_FAILURE_S`, and TooManyConstraintsError.
        """
        key = grammar_key(constraint)
        grammar = self._grammars.get(key)
        if grammar is not None:
            self._grammars.move_to_end(key)
            return grammar
        if key in self._failures:
            error, end = self._failures[key]
            if time.monotonic() < end:
                raise error
            del self._failures[key]
        job = self._jobs.get(key)
        if job is None:
            if not waiter.is_replay:
                self._check_room(waiter.owner)
            job = self._jobs[key] = Job(key)
            self._add_waiter(job, waiter)
            (self._slow if may_take_long(key) else self._quick).add(job)
        else:
            self._add_waiter(job, waiter)
            for lane in (self._quick, self._slow):
                lane.note_owners(job)
        return None

    def forget(self, key: WaiterKey) -> None:
        """Note that a request has ended, and end its compilation if no other request waits for it.

        No-op if the request does not wait.
        """
        job = self._job_of.get(key)
        if job is None:
            return
        self._remove_waiter(job, key)
        if job.waiters:
            for lane in (self._quick, self._slow):
                lane.note_owners(job)
            return
        if self._jobs.get(job.constraint) is job:
            del self._jobs[job.constraint]
        for lane in (self._quick, self._slow):
            if lane.remove(job):
                self._compilation.cancel(is_quick=lane is self._quick)

    def take_compiled(self) -> list[Compiled]:
        """Return the compilations that have ended since the last call and for which requests wait."""
        if self._ended.empty():  # costs less than the exception
            return []
        try:
            count = os.eventfd_read(self.fd)
        except BlockingIOError:
            return []
        compiled = []
        for job, result in [self._ended.get() for _ in range(count)]:
            key = job.constraint
            if self._jobs.get(key) is job:
                del self._jobs[key]
            waiters = list(job.waiters)
            for waiter in waiters:
                self._remove_waiter(job, waiter)
            if not isinstance(result, GrammarError):
                self._keep(key, result)
                # A successor would hold the interpreter lock while it parses a large schema, so that one has a trial.
                if not may_take_long(key):
                    self._note_success(_digest(key))
            elif waiters and not isinstance(result, NotCompiledError):
                self._failures[key] = (result, time.monotonic() + _FAILURE_S)
            if waiters:
                compiled.append(Compiled(key, waiters, result))
        self._evict()
        return compiled

    def close(self) -> None:
        """End the threads, and close `fd`. A library that compiles may keep its thread until the process ends."""
        self._compilation.stop()
        self._outside.close()
        if self._quick.stop() & self._slow.stop():
            os.close(self.fd)

    def _check_room(self, owner: Hashable) -> None:
        """Raise TooManyConstraintsError if `owner` may not have another constraint compiled."""
        num_own, num_all = len(self._jobs_of.get(owner, ())), len(self._jobs)
        if num_own >= _MAX_PENDING_OF_OWNER:
            raise TooManyConstraintsError(
                f"too many constraints are being compiled for this client: the limit is {_MAX_PENDING_OF_OWNER}; send "
                "the request again later"
            )
        if num_all >= _MAX_PENDING and num_own >= _SURE_PENDING:
            raise TooManyConstraintsError(
                f"too many constraints are being compiled: the limit is {_MAX_PENDING}; send the request again later"
            )

    def _add_waiter(self, job: Job, waiter: Waiter) -> None:
        job.waiters[waiter.key] = waiter
        self._job_of[waiter.key] = job
        jobs = self._jobs_of[waiter.owner]
        jobs[job] = jobs.get(job, 0) + 1

    def _remove_waiter(self, job: Job, key: WaiterKey) -> None:
        waiter = job.waiters.pop(key)
        del self._job_of[key]
        jobs = self._jobs_of[waiter.owner]
        jobs[job] -= 1
        if not jobs[job]:
            del jobs[job]
        if not jobs:
            del self._jobs_of[waiter.owner]

    def _keep(self, key: Constraint, grammar: Grammar) -> None:
        former = self._grammars.pop(key, None)
        self._num_bytes += grammar.num_bytes - (0 if former is None else former.num_bytes)
        self._grammars[key] = grammar

    def _note_success(self, digest: bytes) -> None:
        if digest not in self._tried:
            self._tried[digest] = None
            self._note_tried(digest)
            if len(self._tried) > MAX_TRIED:
                self._tried.popitem(last=False)

    def _evict(self) -> None:
        """Forget the least recently used grammars beyond the limits; requests that use them keep them alive."""
        while len(self._grammars) > _MAX_GRAMMARS or (self._num_bytes > _MAX_BYTES and len(self._grammars) > 1):
            _, grammar = self._grammars.popitem(last=False)
            self._num_bytes -= grammar.num_bytes
        while len(self._failures) > _MAX_FAILURES:
            self._failures.popitem(last=False)

    def _compile(self, job: Job, is_quick: bool) -> None:
        """Do a job, in the thread of a lane."""
        result: Grammar | GrammarError
        try:
            if _digest(job.constraint) in self._tried:
                prepared = self._compilation.prepare(job.constraint)
            else:
                trial = Trial(job.constraint, job.is_replay, job.is_needed)
                tried = self._compilation.try_out(trial, is_quick)
                if tried is None:
                    self._slow.add(job)
                    return
                prepared = tried
            if not job.is_needed():
                return
            with self._outside.of(*job.tasks()):
                result = self._compilation.compile(prepared)
        except TrialUnavailableError as error:
            job.num_killed += isinstance(error, TrialKilledError)
            if job.is_replay and job.num_killed < _MAX_KILLED:
                lane = self._quick if is_quick else self._slow
                logger.warning("%s; it is tried again for requests of an earlier core", error)
                lane.wait(_RETRY_S)
                lane.add(job)
                return
            result = NotCompiledError(f"the constraint cannot be compiled now: {error}; send the request again later")
            if isinstance(error, TrialKilledError):
                result = GrammarError(str(error))
        except GrammarError as error:
            result = error.with_traceback(None)
        except Exception as error:
            logger.exception("a constraint of kind %s could not be compiled", job.constraint.kind)
            result = GrammarError(f"the constraint could not be compiled: {type(error).__name__}: {error}")
        self._note_end(job, result)

    def _refuse(self, job: Job, error: Exception) -> None:
        self._note_end(
            job, NotCompiledError(f"the constraint cannot be compiled now: {error}; send the request again later")
        )

    def _note_end(self, job: Job, result: Grammar | GrammarError) -> None:
        """Make the result of a compilation known; any thread may call this."""
        self._ended.put((job, result))
        os.eventfd_write(self.fd, 1)


def _digest(constraint: Constraint) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(constraint)).digest()[:DIGEST_BYTES]


def may_take_long(constraint: Constraint) -> bool:
    """Return whether a constraint is tried where others do not wait for it, because it may take long to compile."""
    if len(constraint.text) > _MAX_PLAIN.get(constraint.kind, -1):
        return True
    return constraint.kind == "json" and any(keyword in constraint.text for keyword in _COSTLY_KEYWORDS)
