"""The core's loop: receive, schedule, run, publish."""

import logging
import os
from typing import Any

import torch
import zmq

from vllm_mp.config import VllmConfig
from vllm_mp.core.batch import Batch
from vllm_mp.core.block_pool import BlockPool
from vllm_mp.core.invariants import check_invariants
from vllm_mp.core.model_runner import ModelRunner
from vllm_mp.core.pause import Pause
from vllm_mp.core.sampler import Sampler
from vllm_mp.core.scheduler import Scheduler
from vllm_mp.core.server import Server
from vllm_mp.core.stop_signal import StopSignal
from vllm_mp.status_page import StatusPage

logger = logging.getLogger(__name__)

_BEAT_MS = 500


class EngineCore:
    """Runs requests until it is told to stop: never sleeping while there is work, blocked in poll without.

    Work is what may run: what a pause holds back is none, so a paused core costs nothing, and one that is told to
    finish its work before it stops does not wait for a `resume` that may never come.
    """

    def __init__(
        self,
        config: VllmConfig,
        device: torch.device,
        runner: ModelRunner,
        server: Server,
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
        self._checks_invariants = scheduler_config.check_invariants
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
                "reset_prefix_cache": self._scheduler.forget_prefixes,
                "pause": self._pause.pause,
                "resume": self._pause.resume,
            },
        )

    def run(self) -> None:
        """Serve until told to stop; where the stop is to drain, until no request is left that may run."""
        self._note_state()
        while not self._stop.is_set or (self._stop.drain and self._scheduler.has_work):
            self._wait()
            self._server.receive(admit=not self._stop.is_set)
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
            "num_dropped_messages": self._server.num_dropped,
            "num_clients": self._server.num_clients,
        }

    def _wait(self) -> None:
        """Return at once while there is work, else when a message or the stop arrives, and beat now and then."""
        if not self._scheduler.has_work:
            self._poller.poll(_BEAT_MS)
            self._page.beat()

    def _run_step(self) -> None:
        step = self._scheduler.schedule()
        if step is None:
            return
        self._step += 1
        batch, rows = self._batch, step.rows
        num_output = batch.num_tokens[rows] - batch.num_prompt[rows]
        self._page.begin_step(self._step, batch.client[rows], batch.slot[rows], num_output)
        computed = self._runner.execute(step, self._batch, self._sampler)
        result = self._scheduler.update(step, computed.tokens, computed.vectors)
        self._note_state()
        self._server.publish(self._step, result, computed)

    def _note_state(self) -> None:
        self._page.end_step(
            self._scheduler.num_running,
            self._scheduler.num_waiting,
            self._pool.num_free,
            self._pool.num_blocks,
        )
