"""The core's loop: receive, schedule, launch, process the step before, publish."""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Sequence
from socket import gethostname
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import zmq

from vllm_mp.config import VllmConfig
from vllm_mp.core.activity_log import ActivityLog
from vllm_mp.core.images.image_store import ImageStore
from vllm_mp.core.ipc.call_handler import Operation, OperatorCall, StepFailedError
from vllm_mp.core.ipc.request_handler import RequestHandler
from vllm_mp.core.lora.adapter_cache import AdapterCache
from vllm_mp.core.lora.reader import adapter_reader
from vllm_mp.core.outside_work import OutsideWork
from vllm_mp.core.pages.weight_pages import move_weights_later
from vllm_mp.core.parallel.followers import Followers, GroupMemory, GroupProfiler
from vllm_mp.core.scheduler.batch import NO_ROWS, Batch, Rows
from vllm_mp.core.scheduler.cache.kv_cache_manager import KVCacheManager
from vllm_mp.core.scheduler.encoding_pace import EncodingPace
from vllm_mp.core.scheduler.invariants import check_invariants
from vllm_mp.core.scheduler.pause import Pause
from vllm_mp.core.scheduler.scheduler import Scheduler
from vllm_mp.core.scheduler.step import ScheduledStep
from vllm_mp.core.scheduler.waiting.adapter_turns import AdapterTurns
from vllm_mp.core.step_limits import StepLimits
from vllm_mp.core.stop_signal import StopSignal
from vllm_mp.core.structured_output.compiler import GrammarCompiler
from vllm_mp.core.structured_output.grammar_tokenizer import TokenizerSource
from vllm_mp.core.structured_output.trial_compilation import TrialCompilation
from vllm_mp.core.suspension_record import SuspensionRecord
from vllm_mp.core.weights.digest import model_digest
from vllm_mp.core.worker.image_encodings import NoMemoryForImageError
from vllm_mp.core.worker.memory.sleep import Sleep
from vllm_mp.core.worker.model_runner import ModelRunner
from vllm_mp.core.worker.profiler import Profiler
from vllm_mp.core.worker.sampling.registered_processors import RegisteredProcessors
from vllm_mp.core.worker.sampling.sampler import Sampler
from vllm_mp.core.worker.worker import Worker
from vllm_mp.core_link.core_status import NOT_SUSPENDED, SleepState, StepRequests, Suspension
from vllm_mp.core_link.status_page import StatusPage
from vllm_mp.machine.host_memory import host_memory
from vllm_mp.model_store.tokenizer_files import LIST_CALL, READ_CALL, TokenizerFiles
from vllm_mp.requests.lora_request import AdapterRecord
from vllm_mp.wire import NO_DIGEST, WEIGHTS, ModelDigest

logger = logging.getLogger(__name__)

_BEAT_MS = 500
"""Interval of the heartbeats of a core without work."""
_QUIET_MS = 10
"""Time without news after which memory is prepared for later steps."""
_PAUSE_MS = 1
"""Time without news between two pages that are prepared."""
_PAGES_AT_ONCE = 16
"""Most pages that are prepared before the core looks for anything else to do."""

P = ParamSpec("P")
T = TypeVar("T")


class EngineCore:
    """Runs requests until it is told to stop; never waits while there is work, and blocks in poll without work.

    With `async_scheduling` one step stays pending while the next step is scheduled and launched, so that the device
    never waits for the host. Without, each step is processed as soon as it is launched. In a pipeline, as many steps
    are under way as there are stages.

    Work means requests that may run now. Requests that a pause or a sleep holds back are no work: a paused core uses no
    processor time, and a core that is told to finish its work before it stops does not wait for a `resume` or `wake_up`
    that may never come.
    """

    def __init__(
        self,
        config: VllmConfig,
        device: torch.device,
        runner: ModelRunner,
        handler: RequestHandler,
        socket: "zmq.Socket[bytes]",
        stop: StopSignal,
        page: StatusPage,
        suspension: Suspension = NOT_SUSPENDED,
        processors: RegisteredProcessors | None = None,
        adapters: Sequence[AdapterRecord] | None = None,
        followers: Followers | None = None,
        tried_constraints: Sequence[bytes] = (),
    ) -> None:
        """`socket` is polled for messages, which `handler` reads. `page` gets every change of state.

        `processors` are the operator's logits processors.
        The core enters `suspension`, the pause and the sleep of its predecessor, and knows its `adapters`. Without a
        predecessor it loads the configuration's adapters. `followers` are the other ranks, if there are any, which
        `runner` leads. `tried_constraints` are the digests of constraints that need no trial. Raises ValueError if an
        adapter cannot be loaded.
        """
        scheduler_config, cache = config.scheduler_config, config.cache_config
        model = config.model_config
        self._batch = Batch(
            scheduler_config.max_num_seqs,
            model.max_model_len,
            cache.block_size,
            model.eos_token_ids,
            model.architecture.has_rope_positions,
            model.unnamed_eos_token_id,
        )
        table, file = runner.seal_table(), runner.prefix_reader()
        self._cache = KVCacheManager(self._batch, cache.num_blocks, cache.block_size, table, file)
        if num_found := self._cache.pool.num_found:
            logger.info("%d blocks of the KV cache hold what the core before has computed", num_found)
        self._handler = handler
        self._page = page
        self._model_config = model
        self._outside = OutsideWork(page)
        self._adapters, turns = _make_adapters(config, runner, page, adapters, self._outside)
        num_stages = config.parallel_config.pipeline_parallel_size
        self._scheduler = Scheduler(
            scheduler_config,
            self._batch,
            self._cache,
            turns,
            num_stages,
            speculation=config.speculative_config,
            draft_model=runner.draft,
        )
        if self._scheduler.drafting is not None:
            self._scheduler.drafting.outside = self._outside
        logs_activity = handler.is_shared and not config.observability_config.disable_log_stats
        self._activity = ActivityLog(self._scheduler, logs_activity)
        self._sampler = Sampler(self._batch, device, processors)
        self._suspension = record = SuspensionRecord(page, suspension, handler.tell_pause)
        self._pause = Pause(self._scheduler, handler.send_ends, record.note_pause)
        self._followers = followers
        self._parallel = config.parallel_config
        self._profiler = Profiler(device) if followers is None else GroupProfiler(device, followers)
        memory = runner.released_memory
        if followers is not None:
            memory = GroupMemory(memory, followers)
        self._sleep = Sleep(self._scheduler, memory, handler.send_ends, self._note_sleep)
        self._pause.enter(suspension.pause, suspension.num_draining)
        self._sleep.enter(suspension.sleep)
        compilation = TrialCompilation(TokenizerSource.of(model))
        self._grammars = GrammarCompiler(compilation, self._outside, page.note_tried)
        self._grammars.inherit(tried_constraints)
        self._scheduler.grammars = self._grammars
        self._checks_invariants = scheduler_config.check_invariants
        self._num_ahead = max(int(bool(scheduler_config.async_scheduling)), num_stages - 1)
        """Number of steps that stay pending while there is a next step to launch."""
        self._runner = runner
        self._limits = StepLimits()
        self._encoding_pace = EncodingPace(scheduler_config.max_prefill_slowdown)
        self._num_launched = 0
        """Number of the latest launched step; steps are counted from 1."""
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(stop.fd, zmq.POLLIN)
        self._stop = stop
        self._poller.register(self._grammars.fd, zmq.POLLIN)
        self._poller.register(self._outside.fd, zmq.POLLIN)
        if self._adapters is not None:
            self._poller.register(self._adapters.fd, zmq.POLLIN)
        for descriptor in followers.descriptors if followers is not None else ():
            self._poller.register(descriptor, zmq.POLLIN)
        self._worker = Worker(config, device, runner)
        tokenizer_files = TokenizerFiles(model.tokenizer)
        calls: dict[str, Operation] = {
            "ping": lambda: None,
            "status": self.status,
            LIST_CALL: tokenizer_files.sizes,
            READ_CALL: tokenizer_files.read,
            "reset_prefix_cache": OperatorCall(self._between_steps(self._reset_prefix_cache)),
            "pause": OperatorCall(self._between_steps(self._pause.pause), record, only_waits=True),
            "resume": OperatorCall(self._pause.resume, record),
            "start_profile": OperatorCall(self._between_steps(self._profiler.start)),
            "stop_profile": OperatorCall(self._between_steps(self._profiler.stop)),
            "sleep": OperatorCall(self._sleep.sleep, record),
            "wake_up": OperatorCall(self._sleep.wake_up, record),
            "collective_rpc": OperatorCall(self._between_steps(self._call_workers)),
        }
        if runner.images is not None:
            limit = int(config.multimodal_config.mm_processor_cache_gb * 2**30)
            limit = min(limit, host_memory().total // 8)
            handler.images = ImageStore(runner.images.shape_of, runner.hidden_bytes, limit)
            calls["reset_mm_cache"] = OperatorCall(handler.images.clear)
        handler.adapters = self._adapters
        handler.grammars = self._grammars
        handler.outside = self._outside
        handler.process_pending = self._between_steps(lambda: None)
        handler.serve(self._scheduler, calls | _adapter_calls(self._adapters), page)

    def run(self) -> None:
        """Serve until told to stop; if the stop drains, until there is no work left."""
        self._note_state()
        self._move_weights_later()
        with contextlib.suppress(StopSignal.Stopped):  # from a wake-up that loads weights
            while not self._stop.is_set or (self._stop.drain and self._has_unfinished_work):
                self._wait_for_work()
                self._handler.receive(admit=not self._stop.is_set)
                if not (self._num_launched or self._stop.is_set):
                    self._handler.receive_replays()
                self._settle_sleep()
                self._settle_adapters()
                self._settle_grammars()
                self._settle_outside()
                self._capture_late()
                has_run = self._run_step()
                self._encode_images(is_alone=not has_run)
                self._pause.settle()
                if self._checks_invariants:
                    check_invariants(self._scheduler)

    def close(self) -> None:
        """End the threads that encode images, and what compiles constraints; let the next core have the KV cache."""
        if self._runner.encodings is not None:
            self._runner.encodings.keep(())
        self._grammars.close()
        self._runner.memory.give_up_cache()

    def status(self) -> dict[str, Any]:
        """Return, by name, numbers of steps, requests, blocks and clients, and whether the core is paused or asleep."""
        return {
            "pid": os.getpid(),
            "step": self._num_launched,
            "num_running": self._scheduler.num_running,
            "num_waiting": self._scheduler.num_waiting,
            "num_preemptions": self._scheduler.num_preemptions,
            "free_blocks": self._cache.pool.num_free,
            "total_blocks": self._cache.pool.num_blocks,
            "num_found_blocks": self._cache.pool.num_found,
            "num_recomputed_tokens": self._cache.num_recomputed_tokens,
            "num_blocks_from_file": self._cache.num_blocks_from_file,
            "is_paused": self._scheduler.is_paused,
            "is_sleeping": bool(self._sleep.state.missing),
            "sleep_level": self._sleep.state.level,
            "num_late_graphs": 0 if (late := self._runner.memory.late_captures) is None else late.num_left,
            "num_dropped_messages": self._handler.num_dropped,
            "num_clients": self._handler.num_clients,
            "rank_pids": [os.getpid(), *([] if self._followers is None else self._followers.pids)],
            "rank_nodes": [rank // self._parallel.ranks_per_node for rank in range(self._parallel.world_size)],
            "node_names": [gethostname(), *([] if self._followers is None else self._followers.machines)],
            **({} if self._runner.encodings is None else {"num_encoded_tiles": self._runner.encodings.num_encoded}),
            **({} if self._scheduler.drafting is None else self._scheduler.drafting.counters.figures()),
        }

    @property
    def _has_unfinished_work(self) -> bool:
        """Whether requests run, or will run when their adapters are loaded and their constraints compiled."""
        return self._scheduler.has_work or self._scheduler.has_parked

    def _wait_for_work(self) -> None:
        """Return at once if there is work; else when there is news, at the latest after `_BEAT_MS`.

        News are a message, the stop, an adapter that was loaded, or a constraint that was compiled.
        """
        self._scheduler.assign_adapters()
        if not (self._scheduler.has_work or self._scheduler.pending_steps):
            self._note_state()  # also beats; requests that were aborted after the latest step are not counted any more
            if self._captures_are_due:
                self._poller.poll(0)
            elif not self._poller.poll(_QUIET_MS) and not self._cover_ahead():
                self._poller.poll(_BEAT_MS)
            if self._followers is not None:
                self._followers.look()
            self._activity.note_idle()

    def _cover_ahead(self) -> bool:
        """Prepare memory for some later blocks of the KV cache, until there is news; return whether more may follow."""
        for _ in range(_PAGES_AT_ONCE):
            if not self._runner.memory.cover_ahead():
                return False
            if self._poller.poll(_PAUSE_MS):
                break
        return True

    def _settle_sleep(self) -> None:
        """Carry out the calls of `sleep` and `wake_up` that have arrived, after all pending steps."""
        if self._sleep.is_due:
            self._process_all_but(0)
            self._sleep.settle()
            self._move_weights_later()  # a wake-up has mapped the file again
            self._note_state()

    def _note_sleep(self, state: SleepState) -> None:
        """Publish the memory that the core has released, and which weights it has if a wake-up has read them again.

        Embeddings that the dropped weights have computed are dropped too.
        """
        if _has_dropped_weights(state):
            self._note_model(NO_DIGEST)
            self._handler.drop_embeddings()
        elif _has_dropped_weights(self._suspension.state.sleep):
            self._note_model(model_digest(self._model_config))
        self._suspension.note_sleep(state)

    def _note_model(self, digest: ModelDigest) -> None:
        self._page.note_model(digest)
        self._handler.tell_model(digest)

    def _move_weights_later(self) -> None:
        """Have weights copied to huge pages, unless the cores of this engine share the memory of their file."""
        if self._parallel.data_parallel_size == 1:
            move_weights_later(self._outside.between_steps)

    def _settle_adapters(self) -> None:
        """Let requests use the adapters that were loaded, and end requests whose adapters could not be loaded."""
        if self._adapters is not None:
            for adapter, why in self._adapters.take_loaded():
                self._handler.send_ends(self._scheduler.fail_adapter(adapter, why))

    def _settle_grammars(self) -> None:
        """Let requests run whose constraints were compiled, and end requests whose constraints were refused."""
        for compiled in self._grammars.take_compiled():
            self._handler.send_ends(self._scheduler.note_compiled(compiled.waiters, compiled.result))

    def _settle_outside(self) -> None:
        """Let threads do what must be alone, after all pending steps."""
        if self._outside.is_wanted:
            self._process_all_but(0)
            self._outside.run_alone(self._page.beat)

    @property
    def _captures_are_due(self) -> bool:
        """Whether a graph should be captured before the next step."""
        late = self._runner.memory.late_captures
        is_idle = not (self._scheduler.has_work or self._scheduler.pending_steps)
        return late is not None and late.is_due(is_idle=is_idle)

    def _capture_late(self) -> None:
        """Capture at most one graph that the start left out, after all pending steps."""
        if self._captures_are_due:
            self._process_all_but(0)
            late = self._runner.memory.late_captures
            assert late is not None
            late.capture_next()

    def _run_step(self) -> bool:
        """Launch the next step, if one may be scheduled, and process the pending steps that are due.

        Return whether there was any of both.
        """
        had_pending = len(self._scheduler.pending_steps) > 0
        step = self._scheduler.schedule()
        if step is not None:
            self._num_launched += 1
            num_tokens = len(step.rows) if step.is_plain else int(step.counts.sum())
            limit_ns = self._limits.begin(num_tokens, step.num_decodes < len(step.rows))
            self._page.begin_step(self._num_launched, self._requests_with(step), num_tokens, limit_ns)
            output = self._runner.launch(step, self._batch, self._sampler)
            self._scheduler.launched(step, output, self._num_launched)
            if step.samples_after_update:
                self._process_all_but(1)  # while the device computes the step
            output.sample()
        # Without a step, the oldest pending step must end before another can be scheduled.
        self._process_all_but(self._num_ahead if step is not None else max(0, len(self._scheduler.pending_steps) - 1))
        self._limits.end()
        return step is not None or had_pending

    def _encode_images(self, is_alone: bool) -> None:
        """Encode a slice of an image, after all pending steps; `is_alone`: no other request has had a step before it.

        So running requests get tokens between the slices, and a death is blamed on the request that waits for the
        image.
        """
        encodings, waiting = self._runner.encodings, self._scheduler.waiting
        if encodings is None:
            return
        encodings.keep([(begun.image, begun.tile) for begun in waiting.images.begun])
        if not len(waiting.images) or not (seconds := self._encoding_pace.seconds(is_alone)):
            return
        self._process_all_but(0)
        if (begun := self._scheduler.next_tile()) is None:
            return
        number = self._outside.begin([begun.request.task])
        try:
            if encodings.advance(begun.image, begun.tile, seconds):
                waiting.note_encoded(begun)
        except NoMemoryForImageError as error:
            logger.warning("no memory to encode an image: %s", error)
            why = f"the core has no memory to encode an image ({error}); give a smaller image, or send it later"
            self._handler.send_ends(self._scheduler.fail_image(begun.image, why))
        self._outside.end(number)  # not after another error, which ends the core: then the page names the request
        self._encoding_pace.note_slice()
        self._note_state()

    def _process_all_but(self, count: int) -> None:
        """Wait for the pending steps except the last `count`, process their outputs and publish the updates."""
        while len(self._scheduler.pending_steps) > count:
            pending = self._scheduler.pending_steps.oldest
            output = pending.output.wait()
            update = self._scheduler.update(output)
            self._activity.num_generated += len(update.tokens)
            now = self._note_state()
            if now >= self._activity.due:
                self._activity.write(now)
            self._handler.publish(pending.number, update, output)
            self._profiler.count_step()

    def _call_workers(self, method: Any, arguments: Any) -> Any:
        """Return the result of a method of the worker, or with several ranks the list of their results by rank."""
        own = self._worker.call(method, arguments)
        return own if self._followers is None else [own, *self._followers.run("collective_rpc", method, arguments)]

    def _reset_prefix_cache(self, recomputes_running: bool = False) -> None:
        """Forget all cached prefixes, and with `recomputes_running` what running requests have computed too."""
        if not isinstance(recomputes_running, bool):
            raise ValueError(f"reset_running_requests must be a bool, got {recomputes_running!r}")
        if recomputes_running:
            self._scheduler.preempt_all()
        self._cache.forget_prefixes()

    def _between_steps(self, call: Callable[P, T]) -> Callable[P, T]:
        """Return a function that processes all pending steps, then calls `call`.

        It raises StepFailedError if that processing fails, for which the caller is not to blame.
        """

        @functools.wraps(call)
        def process_and_call(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                self._process_all_but(0)
            except Exception as error:
                raise StepFailedError(f"{type(error).__name__}: {error}") from error
            return call(*args, **kwargs)

        return process_and_call

    def _requests_with(self, step: ScheduledStep) -> StepRequests:
        """Return the requests of `step`, which is about to be launched, and of the pending steps."""
        repeated = self._scheduler.repeated
        if repeated is not None and step is repeated.step:
            return StepRequests(repeated.clients, repeated.slots, repeated.num_output_tokens())
        batch, rows = self._batch, step.rows
        requests = self._step_requests(rows, batch.num_tokens[rows])
        if not self._scheduler.pending_steps:
            return requests
        pending = self._pending_requests(excluded=rows)
        return StepRequests(*(np.concatenate(pair) for pair in zip(requests, pending, strict=True)))

    def _pending_requests(self, excluded: Rows = NO_ROWS) -> StepRequests:
        """Return the live requests of the pending steps, without the rows `excluded` [n]."""
        batch, pending_steps = self._batch, self._scheduler.pending_steps
        is_pending = pending_steps.live_rows()
        is_pending[excluded] = False
        rows = np.flatnonzero(is_pending)
        # An awaited token is not in the output yet.
        return self._step_requests(rows, batch.num_tokens[rows] - pending_steps.awaited_rows()[rows])

    def _step_requests(self, rows: Rows, num_tokens: npt.NDArray[np.int64]) -> StepRequests:
        """Return the requests of `rows` [n], of which `num_tokens` [n] tokens are in prompt and output."""
        batch = self._batch
        num_known = np.minimum(num_tokens, batch.num_computed_tokens[rows])
        num_read = np.where(num_tokens > batch.num_prompt_tokens[rows], num_tokens, num_known)
        return StepRequests(batch.client[rows], batch.slot[rows], num_read - batch.num_prompt_tokens[rows])

    def _note_state(self) -> int:
        """Write the state between two steps to the status page; return the time, in ns of `time.monotonic_ns()`."""
        return self._page.end_step(
            self._scheduler.num_running,
            self._scheduler.num_waiting,
            self._cache.pool.num_free,
            self._cache.pool.num_blocks,
            self._pending_requests() if self._scheduler.pending_steps else None,
        )


def _has_dropped_weights(sleep: SleepState) -> bool:
    """Return whether a wake-up has to read the weights from their files, whatever those hold by then."""
    return sleep.level == 2 and WEIGHTS in sleep.missing


def _make_adapters(
    config: VllmConfig,
    runner: ModelRunner,
    page: StatusPage,
    known: Sequence[AdapterRecord] | None,
    outside: OutsideWork,
) -> tuple[AdapterCache | None, AdapterTurns | None]:
    """Return the adapters that requests may use, and their turns; None without LoRA.

    `known` are a predecessor's adapters; None: load the configuration's. Raises ValueError if that fails.
    """
    limits = config.lora_config
    if limits is None:
        return None, None
    assert runner.memory.adapters is not None
    read = adapter_reader(config.model_config, limits.max_lora_rank)
    cache = AdapterCache(limits.max_cpu_loras, limits.max_loras, read, page.note_adapters, outside)
    if known is None:
        cache.load_first(limits.lora_modules)
    else:
        cache.restore(known)
    return cache, AdapterTurns(limits.max_loras, cache, runner.load_adapter, outside)


def _adapter_calls(adapters: AdapterCache | None) -> dict[str, Operation]:
    """Return the operations on LoRA adapters; none without LoRA."""
    if adapters is None:
        return {}
    return {
        "add_lora": OperatorCall(adapters.add),
        "remove_lora": OperatorCall(adapters.remove),
        "pin_lora": OperatorCall(adapters.pin),
        "list_loras": adapters.ids,
    }
