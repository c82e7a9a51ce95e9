"""Batches of small pieces of work on a worker thread, for the callers of an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

ALONE: Final = "alone"
"""The queue of jobs that cannot share a batch."""


class Microbatcher:
    """Runs the jobs of many callers on one worker thread, in batches, so that the event loop never blocks.

    A caller gets the result or the error of its own job: a batch that fails is run again job by job, and a cancelled
    caller does not affect the others. The object belongs to no event loop: it may be constructed before a loop runs,
    and used in several.

    Args:
        run: returns the results of a batch, a list of jobs of one kind; runs on the worker thread. A failed batch is
            run again as batches of a single job.
        max_batch_size: the maximum number of jobs in a batch, at least 1.
        batch_wait_timeout_s: the maximum time, in seconds, that the first of several jobs waits for more. A single job
            that finds the thread idle does not wait.
        max_batch_cost: the maximum sum of the costs of a batch's jobs; a job of a higher cost runs alone.
        max_inline_cost: a batch that costs at most this runs on the event loop, which is faster than another thread.
    """

    def __init__(
        self,
        run: Callable[[list[Any]], list[Any]],
        max_batch_size: int,
        batch_wait_timeout_s: float = 0.0,
        max_batch_cost: float = math.inf,
        max_inline_cost: int = -1,
    ) -> None:
        self.run = run
        self.max_batch_size = max_batch_size
        self.batch_wait_timeout_s = batch_wait_timeout_s
        self.max_batch_cost = max_batch_cost
        self.max_inline_cost = max_inline_cost
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="vllm-mp-tokenizer")
        self._queues: dict[asyncio.AbstractEventLoop, LoopQueues] = {}
        self._closed = False
        self._owner = os.getpid()

    def queues(self) -> LoopQueues:
        """Return the queues of the running event loop. Raises RuntimeError after `close`, and in a forked child."""
        if self._closed:
            raise _closed_error()
        if os.getpid() != self._owner:
            raise RuntimeError("the tokenizer has no thread in a forked child: create it after the fork")
        loop = asyncio.get_running_loop()
        queues = self._queues.get(loop)
        if queues is None:
            for closed in [other for other in list(self._queues) if other.is_closed()]:
                del self._queues[closed]
            queues = self._queues[loop] = LoopQueues(self, loop)
        return queues

    def close(self) -> None:
        """End the worker thread; callers that still wait get a RuntimeError. Idempotent; from any thread."""
        self._closed = True
        self.executor.shutdown(wait=False, cancel_futures=True)
        for loop, queues in list(self._queues.items()):
            # A closed loop has no callers left.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(queues.fail_all)


@dataclass(slots=True, eq=False)
class _Request:
    """A job and the caller that waits for it."""

    job: Any
    cost: int
    future: asyncio.Future[Any]
    arrived: float
    """In seconds of the event loop's clock."""


_Outcome = tuple[_Request, Any, BaseException | None]
"""A request with its result, or with the error that its caller gets."""


class LoopQueues:
    """The queues of one event loop, one for each kind of job.

    All methods run on that loop, but `_work` and `_finish_soon` on the worker thread. The worker thread has at most one
    batch of each loop; while it runs, the next jobs gather.
    """

    def __init__(self, owner: Microbatcher, loop: asyncio.AbstractEventLoop) -> None:
        self._run = owner.run
        self._executor = owner.executor
        self._max_batch_size = owner.max_batch_size
        self._batch_wait_timeout_s = owner.batch_wait_timeout_s
        self._max_batch_cost = owner.max_batch_cost
        self._max_inline_cost = owner.max_inline_cost
        self._loop = loop
        self._queues: dict[Hashable, deque[_Request]] = {}
        self._running: list[_Request] = []
        self._dispatch_soon = False
        self._timer: asyncio.TimerHandle | None = None

    def add(self, kind: Hashable, job: Any, cost: int = 0) -> asyncio.Future[Any]:
        """Queue a job; return the future of its result. Jobs of equal `kind` may share a batch, except `ALONE`."""
        future: asyncio.Future[Any] = self._loop.create_future()
        queue = self._queues.get(kind)
        if queue is None:
            queue = self._queues[kind] = deque()
        queue.append(_Request(job, cost, future, self._loop.time()))
        if not self._running and not self._dispatch_soon:
            # More jobs may arrive in this tick of the loop.
            self._dispatch_in_next_tick()
        return future

    def fail_all(self) -> None:
        """Fail every waiting caller, because the worker thread was ended."""
        waiting = [*self._running, *(request for queue in self._queues.values() for request in queue)]
        self._queues.clear()
        for request in waiting:
            if not request.future.done():
                request.future.set_exception(_closed_error())

    def _dispatch_in_next_tick(self) -> None:
        self._dispatch_soon = True
        self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Run the batch that is due first, or set a timer until a batch is due."""
        self._dispatch_soon = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running:
            return
        due, kind = math.inf, None
        for candidate in list(self._queues):
            queue = self._queues[candidate]
            while queue and queue[0].future.done():
                queue.popleft()
            if not queue:
                del self._queues[candidate]
            elif (candidate_due := self._due(candidate, queue)) < due:
                due, kind = candidate_due, candidate
        if kind is None:
            return
        if due > self._loop.time():
            self._timer = self._loop.call_at(due, self._dispatch)
            return
        batch, cost = self._take_batch(kind)
        self._running = batch
        if cost <= self._max_inline_cost:
            self._work(batch, self._answer)
            # Not in this tick: other callbacks of the loop run between two batches, however many wait.
            self._dispatch_in_next_tick()
            return
        try:
            self._executor.submit(self._work, batch, self._finish_soon)
        except RuntimeError:
            # Another thread ended the worker thread meanwhile, or the interpreter is exiting.
            self.fail_all()

    def _due(self, kind: Hashable, queue: deque[_Request]) -> float:
        """Return when a queue's next batch should run, in seconds of the event loop's clock."""
        gathers = kind != ALONE and 1 < len(queue) < self._max_batch_size
        return queue[0].arrived + (self._batch_wait_timeout_s if gathers else 0.0)

    def _take_batch(self, kind: Hashable) -> tuple[list[_Request], int]:
        """Remove the next batch from its queue; return it with the sum of its costs."""
        queue = self._queues[kind]
        batch = [queue.popleft()]
        cost = batch[0].cost
        size = 1 if kind == ALONE else min(1 + len(queue), self._max_batch_size)
        while len(batch) < size and cost + queue[0].cost <= self._max_batch_cost:
            batch.append(queue.popleft())
            cost += batch[-1].cost
        return batch, cost

    def _work(self, batch: list[_Request], deliver: Callable[[list[_Outcome]], None]) -> None:
        """Run a batch, with one call if possible, and deliver its outcomes. A small batch runs on the loop."""
        requests = [request for request in batch if not request.future.cancelled()]
        outcomes: list[_Outcome]
        try:
            results = self._run([request.job for request in requests]) if requests else []
            outcomes = [(request, result, None) for request, result in zip(requests, results, strict=True)]
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in the tokenizer's Rust code is not an Exception
            if len(requests) == 1:
                outcomes = [(requests[0], None, _raisable(error))]
            else:
                # The failure occurs again for the job that caused it.
                outcomes = [_alone(self._run, request) for request in requests]
        deliver(outcomes)

    def _finish_soon(self, outcomes: list[_Outcome]) -> None:
        """Call `_finish` on the loop, from the worker thread."""
        # The loop may be closed by now, and then it has no callers left.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._finish, outcomes)

    def _finish(self, outcomes: list[_Outcome]) -> None:
        """Answer the callers of a batch of the worker thread, and dispatch the next batch."""
        self._answer(outcomes)
        self._dispatch()

    def _answer(self, outcomes: list[_Outcome]) -> None:
        """Give the callers of a batch its outcomes."""
        self._running = []
        for request, result, error in outcomes:
            if request.future.done():
                continue
            if error is None:
                request.future.set_result(result)
            else:
                request.future.set_exception(error)


def _alone(run: Callable[[list[Any]], list[Any]], request: _Request) -> _Outcome:
    """Return the outcome of a request that is a batch of its own."""
    if request.future.cancelled():
        return request, None, None
    try:
        (result,) = run([request.job])
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        return request, None, _raisable(error)
    return request, result, None


def _raisable(error: BaseException) -> Exception:
    """Return `error` as an exception that a caller who awaits the result can handle."""
    # StopIteration cannot be raised through an await. All but Exceptions would pass the caller's handlers.
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    failure = RuntimeError(f"the tokenizer failed: {error!r}")
    failure.__cause__ = error
    return failure


def _closed_error() -> RuntimeError:
    return RuntimeError("the tokenizer is closed: create a new AsyncMicrobatchTokenizer")
