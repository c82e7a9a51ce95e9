"""An engine: its cores, requests, statistics, loggers and tokenizer; its end; forks of its process."""

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from vllm_mp import wire
from vllm_mp.client.cores.core_group import CoreGroup
from vllm_mp.client.cores.supervisor import CoreSupervisor
from vllm_mp.client.engine.end import EngineEnd
from vllm_mp.client.engine.prompt_images import ProcessorFiles, PromptImages
from vllm_mp.client.engine.request_log import log_end
from vllm_mp.client.outputs.live_requests import LiveRequests
from vllm_mp.client.prompts.prompt_tokenizer import PromptTokenizer
from vllm_mp.client.stat_loggers import LoggingStatLogger, StatLoggers
from vllm_mp.client.stat_loggers.readings import EngineReadings
from vllm_mp.client.stats import EngineStats
from vllm_mp.client.stats.tracing import RequestTracer
from vllm_mp.client.threads.interrupted_cell import end_interrupted_cells
from vllm_mp.core_link.status_page import StatusPage
from vllm_mp.errors import EngineDeadError, EngineError

OpenCore = Callable[[int, str | None, StatusPage | None], CoreSupervisor]
"""Opens a further core of an engine, given its rank, its address (None: a core is started) and the status page of a
core whose pause, sleep and adapters it must have too."""

_DETECTION_S = 2.0
"""Time beyond `engine_iteration_timeout_s` after which a core that hangs has been found and killed."""
_engines: "weakref.WeakSet[Engine]" = weakref.WeakSet()
"""The engines of this process."""


class Engine:
    """What an `AsyncLLM` runs on: the owner of all that must be released at the end, and the checks before each use.

    Only the process that made it may use it. `attach` comes before all that needs the cores, `admit_request` before a
    request.
    """

    def __init__(
        self,
        supervisors: list[CoreSupervisor],
        prompt_tokenizer: PromptTokenizer | None,
        tracer: RequestTracer | None = None,
        open_core: OpenCore | None = None,
        processor_files: ProcessorFiles = dict,
    ) -> None:
        """`supervisors` has one for each core, in the order of their ranks, and `open_core` opens a further core.
        `processor_files` returns the files of the model's image processor.

        `prompt_tokenizer` is None with skip_tokenizer_init; both it and `tracer` are closed with the engine.
        """
        self.vllm_config = supervisors[0].core.config
        self.prompt_tokenizer = prompt_tokenizer
        self.open_core = open_core
        self.images = PromptImages(self.vllm_config, prompt_tokenizer, processor_files)
        self.is_tracing = tracer is not None
        model, cache = self.vllm_config.model_config, self.vllm_config.cache_config
        self.stats = EngineStats(model.max_model_len, cache.enable_prefix_caching)
        if tracer is not None:
            self.stats.add_listener(tracer)
        if not self.vllm_config.observability_config.disable_log_requests:
            self.stats.add_listener(log_end)
        self.requests = LiveRequests(self.stats.note_end)
        self.cores = CoreGroup(supervisors, self.requests, self.stats)
        self.readings = EngineReadings(self.vllm_config, self.stats, self.requests, self.cores)
        self.stat_loggers = StatLoggers(self.readings)
        if not self.vllm_config.observability_config.disable_log_stats:
            self.stat_loggers.add_all({LoggingStatLogger.default_name: LoggingStatLogger})
        self.accepts_requests = True
        """False while the background loop is stopped, as vLLM calls it."""
        self.starts_loop_for_requests = True
        """A request starts the background loop if it is stopped; otherwise it is refused."""
        self._end = EngineEnd(self, supervisors, prompt_tokenizer, self.images, tracer, self.stat_loggers)
        self._is_shut_down = False
        self._owner = os.getpid()
        _engines.add(self)
        end_interrupted_cells()

    @property
    def is_stopped(self) -> bool:
        """The engine was shut down, or all cores are gone for good."""
        return self._is_shut_down or self.cores.dead_error is not None

    @property
    def is_forked(self) -> bool:
        """This process was forked after the engine was made, and cannot use it."""
        return os.getpid() != self._owner

    def fork_error(self) -> RuntimeError:
        """Return the error of every use in a forked child."""
        return RuntimeError(
            f"this engine belongs to process {self._owner}, and this process, {os.getpid()}, was forked from it later; "
            "make an engine after the fork (with gunicorn, leave --preload out)"
        )

    def check_process(self) -> None:
        """Raise RuntimeError if this process was forked after the engine was made."""
        if self.is_forked:
            raise self.fork_error()

    def attach(self) -> None:
        """Receive from the cores on the running loop.

        Raises EngineDeadError if all cores are gone for good, and RuntimeError in a forked child.
        """
        self.check_process()
        self.cores.attach()

    @contextlib.contextmanager
    def explaining_shutdown(self) -> Iterator[None]:
        """Raise EngineDeadError for a RuntimeError of the block, such as that of a closed tokenizer, after the end."""
        try:
            yield
        except RuntimeError:
            self._check_open()
            raise

    def _check_open(self) -> None:
        if self._is_shut_down:
            raise EngineDeadError("the engine was shut down: make a new AsyncLLM")

    def admit_request(self) -> None:
        """Do what `attach` does, and start the background loop if it is stopped.

        Raises EngineDeadError if the loop was never to start by itself.
        """
        self.attach()
        self.accepts_requests = self.accepts_requests or self.starts_loop_for_requests
        self.attach_admitted()

    def attach_admitted(self) -> None:
        """Do what `attach` does for an admitted request; raise EngineDeadError if the loop was stopped since."""
        self.attach()
        if not self.accepts_requests:
            raise EngineDeadError(
                "the background loop is stopped, by start_engine_loop=False or shutdown_background_loop(): call "
                "start_background_loop() first"
            )

    async def call(self, name: str, *args: wire.CallArgument) -> list[Any]:
        """Run an operation that may take any time in every core, and return their results.

        Raises EngineError if a core answers with an error.
        """
        self.attach()
        return await self.cores.call(name, None, *args)

    async def ask(self, name: str, *args: wire.CallArgument, awaits_successor: bool = True) -> list[Any]:
        """Do what `call` does for an operation that a core answers between two steps; also raise EngineError if not.

        Return at least one result. With `awaits_successor`, a core that dies or hangs meanwhile costs time only.
        """
        self.attach()
        limit = self.vllm_config.liveness_config.engine_iteration_timeout_s
        if awaits_successor:
            limit += _DETECTION_S
        try:
            return await self.cores.call(name, limit, *args, awaits_successor=awaits_successor)
        except TimeoutError as error:
            states = "; ".join(str(client.supervisor.status()) for client in self.cores.clients)
            raise EngineError(f"the core has not answered for {limit:g} s: {states}") from error

    def start_background_loop(self) -> None:
        """Accept requests again; raises what `AsyncLLM.start_background_loop` raises."""
        self.check_process()
        self._check_open()
        if (error := self.cores.dead_error) is not None:
            raise error
        if self.accepts_requests:
            raise RuntimeError("the background loop runs already: call shutdown_background_loop() first")
        self.accepts_requests = True

    def shutdown_background_loop(self) -> None:
        """Abort all requests, also those that are being admitted; idempotent."""
        self.check_process()
        self.accepts_requests = False
        self.cores.run_on_loop(self._abort_all)

    def shutdown(self, timeout: float | None = None) -> None:
        """Release everything, each core by force after `timeout` seconds; live streams fail. Idempotent."""
        if self._begin_shutdown():
            self._end.run(timeout)
        else:
            self._end.wait()

    async def aclose(self, timeout: float | None = None) -> None:
        """Do what `shutdown` does, beside the event loop; cancelling the call does not undo it."""
        if self._begin_shutdown():
            self._end.begin(timeout)
        if not self.is_forked:
            await self._end.done()

    def _begin_shutdown(self) -> bool:
        """End all streams; return whether this is the first call, after which everything must be released."""
        if self._is_shut_down or self.is_forked:
            return False
        self._is_shut_down = True
        self.cores.fail_all(EngineDeadError("the engine was shut down"))
        return True

    def _abort_all(self) -> None:
        for request_id in self.requests.ids():
            self.cores.abort(request_id)


def _fail_streams() -> None:
    """End the streams of all engines in a forked child, which has no thread and no socket that could go on with them.

    No consumer is woken, because the event loop in which it waits is the parent's.
    """
    for engine in list(_engines):
        for stream in engine.requests.streams():
            stream.error = engine.fork_error()


os.register_at_fork(after_in_child=_fail_streams)
