"""The core's loop: receive, schedule, launch, finish what was launched before, publish."""

import contextlib
import functools
import logging
import os
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
import zmq

from vllm_mp.config import VllmConfig
from vllm_mp.core.ipc.request_handler import RequestHandler
from vllm_mp.core.scheduler.batch import NO_ROWS, Batch, Rows
from vllm_mp.core.scheduler.block_pool import BlockPool
from vllm_mp.core.scheduler.invariants import check_invariants
from vllm_mp.core.scheduler.pause import Pause
from vllm_mp.core.scheduler.scheduler import ScheduledStep, Scheduler
from vllm_mp.core.stop_signal import StopSignal
from vllm_mp.core.worker.model_runner import ModelRunner, PendingOutput
from vllm_mp.core.worker.profiler import Profiler
from vllm_mp.core.worker.sampler import Sampler
from vllm_mp.core.worker.sleep import Sleep
from vllm_mp.status_page import StatusPage, StepRequests

logger = logging.getLogger(__name__)

_BEAT_MS = 500

P = ParamSpec("P")
T = TypeVar("T")


class PendingStep(NamedTuple):
    """A step that the device may still be computing."""

    number: int
    step: ScheduledStep
    computing: PendingOutput


class EngineCore:
    """Runs requests until it is told to stop: never sleeping while there is work, blocked in poll without.

    With `async_scheduling` one step stays in flight while the next one is scheduled and launched, so that the device
    never waits for the host. Without, each is finished as soon as it is launched.

    Work is what may run: what a pause or sleep holds back is none, so a paused core costs nothing, and one that is told
    to finish its work before it stops does not wait for a `resume` or `wake_up` that may never come.
    """

    def __init__(
        self,
        config: VllmConfig,
        device: torch.device,
        runner: ModelRunner,
        server: RequestHandler,
        socket: "zmq.Socket[bytes]",
        stop: StopSignal,
        page: StatusPage,
    ) -> None:
        scheduler_config, cache = config.scheduler_config, config.cache_config
        model = config.model_config
        self._batch = Batch(scheduler_config.max_num_seqs, model.max_model_len, cache.block_size, model.eos_token_ids)
        self._pool = BlockPool(cache.num_blocks)
        self._scheduler = Scheduler(scheduler_config, self._batch, self._pool, cache.block_size)
        self._sampler = Sampler(self._batch, device)
        self._pause = Pause(self._scheduler, server.send_ends)
        self._profiler = Profiler(device)
        self._sleep = Sleep(self._scheduler, runner, server.send_ends, page.note_sleep)
        self._checks_invariants = scheduler_config.check_invariants
        self._in_flight: deque[PendingStep] = deque()
        self._num_ahead = int(bool(scheduler_config.async_scheduling))
        """Steps that stay in flight while there is a next one to launch."""
        self._runner = runner
        self._server = server
        self._page = page
        self._step = 0
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(stop.fd, zmq.POLLIN)
        self._stop = stop
        server.serve(
            self._scheduler,
            {
                "ping": lambda: None,
                "status": self.status,
                "reset_prefix_cache": self._when_finished(self._scheduler.forget_prefixes),
                "pause": self._when_finished(self._pause.pause),
                "resume": self._pause.resume,
                "start_profile": self._when_finished(self._profiler.start),
                "stop_profile": self._when_finished(self._profiler.stop),
                "sleep": self._sleep.sleep,
                "wake_up": self._sleep.wake_up,
            },
        )

    def run(self) -> None:
        """Serve until told to stop; where the stop is to drain, until no request is left that may run."""
        self._note_state()
        with contextlib.suppress(StopSignal.Stopped):
            while not self._stop.is_set or (self._stop.drain and self._scheduler.has_work):
                self._wait()
                self._server.receive(admit=not self._stop.is_set)
                self._settle_sleep()
                self._run_step()
                self._pause.settle()
                if self._checks_invariants:
                    check_invariants(self._scheduler)

    def status(self) -> dict[str, Any]:
        """What the core holds, in plain numbers."""
        return {
            "pid": os.getpid(),
            "step": self._step,
            "num_running": self._scheduler.num_running,
            "num_waiting": self._scheduler.num_waiting,
            "num_preemptions": self._scheduler.num_preemptions,
            "free_blocks": self._pool.num_free,
            "total_blocks": self._pool.num_blocks,
            "is_paused": self._scheduler.is_paused,
            "is_sleeping": bool(self._sleep.state.missing),
            "sleep_level": self._sleep.state.level,
            "num_dropped_messages": self._server.num_dropped,
            "num_clients": self._server.num_clients,
        }

    def _wait(self) -> None:
        """Return at once while there is work, else when a message or the stop arrives, and beat now and then."""
        if not (self._scheduler.has_work or self._in_flight):
            self._poller.poll(_BEAT_MS)
            self._page.beat()

    def _settle_sleep(self) -> None:
        if self._sleep.is_due:
            self._finish_all_but(0)
            self._sleep.settle()
            self._note_state()

    def _run_step(self) -> None:
        """Launch the next step, if there is one that can go ahead, and finish those before it that are due."""
        step = self._scheduler.schedule()
        if step is not None:
            self._launch(step)
        self._finish_all_but(self._num_ahead if step is not None else 0)

    def _launch(self, step: ScheduledStep) -> None:
        self._step += 1
        self._page.begin_step(self._step, self._requests_with(step))
        computing = self._runner.launch(step, self._batch, self._sampler)
        self._scheduler.launched(step)
        self._in_flight.append(PendingStep(self._step, step, computing))

    def _finish_all_but(self, count: int) -> None:
        """Wait for the steps in flight but for the last `count`, and publish what they have brought."""
        while len(self._in_flight) > count:
            number, step, computing = self._in_flight.popleft()
            computed = computing.wait()
            result = self._scheduler.update(step, computed.tokens, computed.vectors)
            self._note_state()
            self._server.publish(number, result, computed)
            self._profiler.count_step()

    def _when_finished(self, call: Callable[P, T]) -> Callable[P, T]:
        """`call`, which is not for the middle of a step, made with none in flight."""

        @functools.wraps(call)
        def finish_and_call(*args: P.args, **kwargs: P.kwargs) -> T:
            self._finish_all_but(0)
            return call(*args, **kwargs)

        return finish_and_call

    def _requests_with(self, step: ScheduledStep) -> StepRequests:
        """Those of `step`, which is about to be launched, and of the steps in flight."""
        batch, rows = self._batch, step.rows
        requests = StepRequests(
            batch.client[rows], batch.slot[rows], batch.num_tokens[rows] - batch.num_prompt_tokens[rows]
        )
        if not self._in_flight:
            return requests
        before = self._requests_in_flight(but=rows)
        return StepRequests(*(np.concatenate(pair) for pair in zip(requests, before, strict=True)))

    def _requests_in_flight(self, but: Rows = NO_ROWS) -> StepRequests:
        """Those of the steps in flight, but for those in the rows `but` [n]."""
        batch, is_in_flight = self._batch, self._scheduler.is_in_flight()
        is_in_flight[but] = False
        rows = np.flatnonzero(is_in_flight)
        # The token that a step in flight samples is not in the answer yet.
        num_output_tokens = batch.num_tokens[rows] - batch.num_prompt_tokens[rows] - self._scheduler.is_awaited()[rows]
        return StepRequests(batch.client[rows], batch.slot[rows], num_output_tokens)

    def _note_state(self) -> None:
        self._page.end_step(
            self._scheduler.num_running,
            self._scheduler.num_waiting,
            self._pool.num_free,
            self._pool.num_blocks,
            self._requests_in_flight() if self._in_flight else None,
        )
