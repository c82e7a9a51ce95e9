"""What an engine holds in the process of its client, the end of its use, and forks of that process."""

import os
import types
import weakref
from collections.abc import Callable
from typing import Any, Self

from vllm_mp import wire
from vllm_mp.client.cores.core_client import EngineCoreClient
from vllm_mp.client.cores.core_group import CoreGroup
from vllm_mp.client.cores.supervisor import CoreSupervisor
from vllm_mp.client.engine.end import EngineEnd
from vllm_mp.client.engine.request_log import log_end
from vllm_mp.client.outputs.live_requests import LiveRequests
from vllm_mp.client.prompts.prompt_tokenizer import PromptTokenizer
from vllm_mp.client.stat_loggers import LoggingStatLogger, StatLoggers
from vllm_mp.client.stat_loggers.readings import EngineReadings
from vllm_mp.client.stats import EngineStats
from vllm_mp.client.stats.tracing import RequestTracer
from vllm_mp.client.threads.completed_call import CompletedCall
from vllm_mp.client.threads.interrupted_cell import end_interrupted_cells
from vllm_mp.core_link.status_page import StatusPage
from vllm_mp.errors import EngineDeadError, EngineError

OpenCore = Callable[[int, str | None, StatusPage | None], CoreSupervisor]
"""Opens a further core of an engine, given its rank, its address (None: a core is started) and the status page of a
core whose pause, sleep and adapters it must have too."""

_engines: "weakref.WeakSet[EngineLifecycle]" = weakref.WeakSet()
"""The engines of this process."""


class EngineLifecycle:
    """The state of an `AsyncLLM`, and the part of its methods that begins and ends its use."""

    def __init__(
        self,
        supervisors: list[CoreSupervisor],
        prompt_tokenizer: PromptTokenizer | None,
        tracer: RequestTracer | None = None,
        open_core: OpenCore | None = None,
    ) -> None:
        """`supervisors` has one for each core, in the order of their ranks, and `open_core` opens a further core.

        `prompt_tokenizer` is None with skip_tokenizer_init; both it and `tracer` are closed with the engine.
        """
        self.vllm_config = supervisors[0].core.config
        self.model_config = self.vllm_config.model_config
        self._open_core = open_core
        self._opening_places: set[int] = set()
        """The places of cores that are being added."""
        self._prompt_tokenizer = prompt_tokenizer
        self._tracer = tracer
        self.stats = EngineStats(self.model_config.max_model_len, self.vllm_config.cache_config.enable_prefix_caching)
        """What this client counts; it needs no core to be read."""
        if tracer is not None:
            self.stats.add_listener(tracer)
        if not self.vllm_config.observability_config.disable_log_requests:
            self.stats.add_listener(log_end)
        self._requests = LiveRequests(self.stats.note_end)
        self._cores = CoreGroup(supervisors, self._requests, self.stats)
        self.readings = EngineReadings(self.vllm_config, self.stats, self._requests, self._cores)
        """The counters and the load of the cores, for readers in any thread."""
        self._stat_loggers = StatLoggers(self.readings)
        if not self.vllm_config.observability_config.disable_log_stats:
            self._stat_loggers.add_all({LoggingStatLogger.default_name: LoggingStatLogger})
        self._accepts = True
        self._end = EngineEnd(self, supervisors, prompt_tokenizer, tracer, self._stat_loggers)
        self._is_shut_down = False
        self._owner = os.getpid()
        _engines.add(self)
        end_interrupted_cells()

    @property
    def is_running(self) -> bool:
        return self._accepts and not self.is_stopped

    @property
    def is_stopped(self) -> bool:
        return self._is_shut_down or self.errored

    @property
    def errored(self) -> bool:
        """All cores are gone for good."""
        return self.dead_error is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why all cores are gone for good; None while one is not."""
        return self._cores.dead_error

    @property
    def _core_client(self) -> EngineCoreClient:
        """The client of the core with the lowest rank."""
        return self._cores.first

    @property
    def _supervisor(self) -> CoreSupervisor:
        """The supervisor of the core with the lowest rank."""
        return self._cores.first.supervisor

    def start_background_loop(self) -> CompletedCall:
        """Accept requests, after `start_engine_loop=False` or `shutdown_background_loop`; `await` is optional.

        Raises RuntimeError if the loop runs, and EngineDeadError if the core is gone for good.
        """
        self._check_process()
        if self._is_shut_down:
            raise EngineDeadError("the engine was shut down: make a new AsyncLLM")
        if (error := self.dead_error) is not None:
            raise error
        if self._accepts:
            raise RuntimeError("the background loop runs already: call shutdown_background_loop() first")
        self._accepts = True
        return CompletedCall()

    def shutdown_background_loop(self) -> CompletedCall:
        """Abort all requests, as `abort` does, and refuse further ones until `start_background_loop`; idempotent.

        The core keeps running, and other calls still work; `shutdown` ends the core. `await` is optional.
        """
        self._check_process()
        self._accepts = False
        self._cores.run_on_loop(self._abort_all)
        return CompletedCall()

    def shutdown(self, timeout: float | None = None) -> None:
        """End the core, by force after `timeout` seconds, and remove its files; live streams fail. Idempotent.

        A shared core, as with `connect`, continues without this client's requests.
        """
        if self._begin_shutdown():
            self._end.run(timeout)
        else:
            self._end.wait()

    async def aclose(self, timeout: float | None = None) -> None:
        """Do what `shutdown` does, beside the event loop; a further call waits for the first.

        Cancelling the call does not undo it: the core ends all the same.
        """
        if self._begin_shutdown():
            self._end.begin(timeout)
        if not self.is_forked:
            await self._end.done()

    async def __aenter__(self) -> Self:
        self._check_process()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        await self.aclose()

    @property
    def is_forked(self) -> bool:
        """This process was forked after the engine was made, and cannot use it."""
        return os.getpid() != self._owner

    def _check_process(self) -> None:
        """Raise RuntimeError if this process was forked after the engine was made."""
        if self.is_forked:
            raise self._fork_error()

    def _fork_error(self) -> RuntimeError:
        return RuntimeError(
            f"this engine belongs to process {self._owner}, and this process, {os.getpid()}, was forked from it later; "
            "make an engine after the fork (with gunicorn, leave --preload out)"
        )

    def _begin_shutdown(self) -> bool:
        """End all streams; return whether this is the first call, after which the core must be ended."""
        if self._is_shut_down or self.is_forked:
            return False
        self._is_shut_down = True
        self._cores.fail_all(EngineDeadError("the engine was shut down"))
        return True

    def _abort_all(self) -> None:
        for request_id in self._requests.ids():
            self._cores.abort(request_id)

    def _attach(self) -> None:
        """Receive from the cores on the running loop.

        Raises EngineDeadError if all cores are gone for good, and RuntimeError in a forked child.
        """
        self._check_process()
        self._cores.attach()

    def _attach_to_loop(self) -> None:
        """Do what `_attach` does, and raise EngineDeadError also if the background loop is stopped."""
        self._attach()
        if not self._accepts:
            raise EngineDeadError(
                "the background loop is stopped, by start_engine_loop=False or shutdown_background_loop(): call "
                "start_background_loop() first"
            )

    async def _call(self, name: str, *args: wire.CallArgument) -> list[Any]:
        """Run an operation that may take any time in every core, and return their results.

        Raises EngineError if a core answers with an error.
        """
        self._attach()
        return await self._cores.call(name, None, *args)

    async def _ask(self, name: str, *args: wire.CallArgument) -> list[Any]:
        """Do what `_call` does for an operation that a core answers between two steps; also raise EngineError if not.

        Return at least one result.
        """
        self._attach()
        limit = self.vllm_config.liveness_config.engine_iteration_timeout_s
        try:
            return await self._cores.call(name, limit, *args)
        except TimeoutError as error:
            states = "; ".join(str(client.supervisor.status()) for client in self._cores.clients)
            raise EngineError(f"the core has not answered for {limit:g} s: {states}") from error


def _fail_streams() -> None:
    """End the streams of all engines in a forked child, which has no thread and no socket that could go on with them.

    No consumer is woken, because the event loop in which it waits is the parent's.
    """
    for engine in list(_engines):
        for stream in engine._requests.streams():
            stream.error = engine._fork_error()


os.register_at_fork(after_in_child=_fail_streams)
