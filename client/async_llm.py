"""The asyncio client of an engine."""

import asyncio
import contextlib
import logging
import time
import types
import uuid
import weakref
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from vllm_mp import wire
from vllm_mp.client.engine.core_client import EngineCoreClient
from vllm_mp.client.engine.launcher import CoreLauncher, RemoteCore
from vllm_mp.client.engine.restart_limit import RestartLimit
from vllm_mp.client.engine.supervisor import CoreSupervisor
from vllm_mp.client.input_processor import InputProcessor
from vllm_mp.client.microbatch_tokenizer import AsyncMicrobatchTokenizer
from vllm_mp.client.outputs.output_processor import OutputProcessor
from vllm_mp.client.outputs.pooling_stream import PoolingStream
from vllm_mp.client.outputs.stream import RequestStream
from vllm_mp.client.prompt import PromptType
from vllm_mp.client.stat_logger import StatsLog
from vllm_mp.client.tokenizer import load_tokenizer
from vllm_mp.config import (
    DecodingConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm_mp.engine_args import EngineArgs
from vllm_mp.errors import EngineDeadError, EngineError
from vllm_mp.model_store import cache_root
from vllm_mp.outputs import PoolingRequestOutput, RequestOutput
from vllm_mp.pooling_params import PoolingParams
from vllm_mp.sampling_params import SamplingParams
from vllm_mp.status_page import CoreState

logger = logging.getLogger(__name__)

_PING_TIMEOUT_S = 5.0
_DRAIN_POLL_S = 0.01


class AsyncLLM:
    """An engine: this asyncio half, and the core process that runs the model.

    Make one with `from_engine_args`, or attach to a running core with `connect`. It may be made before any event loop
    runs; requests belong to the loop that runs when they are made, one loop at a time.
    """

    def __init__(self, supervisor: CoreSupervisor, tokenizer: Any) -> None:
        config = supervisor.core.config
        self.vllm_config = config
        self.model_config = config.model_config
        self._tokenizer = tokenizer
        self._microbatch = AsyncMicrobatchTokenizer(tokenizer) if tokenizer is not None else None
        self._inputs = InputProcessor(config, tokenizer, self._microbatch)
        self._requests = OutputProcessor()
        self._is_shut_down = False
        self._accepts = True
        self._stats = StatsLog()
        self._is_quiet = config.observability_config.disable_log_stats
        self._supervisor = supervisor
        self._finalizer = weakref.finalize(self, _release, supervisor, self._microbatch)
        this = weakref.ref(self)

        def count_tokens(count: int) -> None:
            if (engine := this()) is not None:  # which the link, and with it the loop, must not keep alive
                engine._count_tokens(count)

        self._link = EngineCoreClient(supervisor, self._requests, count_tokens)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: Any = None,
    ) -> Self:
        """Start a core and return when it is ready; works with and without a running event loop.

        `start_engine_loop=False` starts the core all the same, but requests are refused until `start_background_loop`
        is called. `usage_context` is accepted for older callers and has no meaning here. Raises ValueError for options
        that cannot work and EngineStartError, with the cause, when the core does not come up.
        """
        return cls.from_vllm_config(engine_args.create_engine_config(), start_engine_loop, usage_context, stat_loggers)

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: VllmConfig,
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: Any = None,
    ) -> Self:
        """As `from_engine_args`, from a resolved configuration."""
        if stat_loggers:
            raise NotImplementedError("stat_loggers is not served yet; leave it None")
        limits = vllm_config.liveness_config
        restarts = RestartLimit(limits.max_core_restarts, limits.core_restart_window_s) if limits.recovery else None
        source, core = CoreLauncher(vllm_config), None
        try:
            source.begin()
            # The tokenizer loads while the core does.
            tokenizer = _load_tokenizer(vllm_config.model_config)
            core = source.finish(lambda: None)
            engine = cls(CoreSupervisor(source, core, restarts), tokenizer)
        except BaseException:
            source.close(None, core)
            raise
        engine._accepts = start_engine_loop
        return engine

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        key_file: str | None = None,
        timeout: float = 30.0,
        tokenizer: str | None = None,
        reconnect_timeout: float = 300.0,
    ) -> Self:
        """Attach to a core that `vllm-mp engine --listen ADDRESS` serves, waiting `timeout` seconds for it.

        `key_file` is needed for tcp. `tokenizer` is the folder of the tokenizer, if it does not lie where the core has
        it. Several clients may share a core; `shutdown` leaves it running. When it dies, streams wait up to
        `reconnect_timeout` seconds for another to serve the same model at the address, and go on there.
        """
        source = RemoteCore(address, key_file, timeout)
        core = source.finish(lambda: None)
        source.timeout = reconnect_timeout
        # Whoever runs the core says how often it may come back.
        restarts = RestartLimit(None, 1.0) if reconnect_timeout > 0 else None
        try:
            if tokenizer is not None:
                core.config.model_config.tokenizer = tokenizer
            return cls(CoreSupervisor(source, core, restarts), _load_tokenizer(core.config.model_config))
        except BaseException:
            core.connection.close()
            raise

    async def generate(
        self,
        prompt: PromptType | None,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        prompt_token_ids: list[int] | None = None,
        lora_request: Any = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        arrival_time: float | None = None,
        prompt_adapter_request: Any = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the answer to `prompt`; leaving the loop early or cancelling the task aborts it in the core.

        Without `sampling_params` those of the model's generation_config.json apply. With `n` answers each output has
        all of them, or with DELTA those that have news.
        Raises ValueError or TypeError for a request that cannot run, NotImplementedError for what is not served,
        EngineGenerateError when this request fails, and EngineDeadError when the core is gone.
        """
        if isinstance(sampling_params, PoolingParams):
            raise TypeError("sampling_params must be SamplingParams, got PoolingParams; call encode() for a vector")
        stream = await self.add_request(
            request_id,
            prompt,
            sampling_params,
            arrival_time,
            prompt_token_ids=prompt_token_ids,
            lora_request=lora_request,
            trace_headers=trace_headers,
            priority=priority,
            data_parallel_rank=data_parallel_rank,
            tokenization_kwargs=tokenization_kwargs,
            prompt_adapter_request=prompt_adapter_request,
        )
        async with contextlib.aclosing(stream):
            async for output in stream:
                yield output

    async def encode(
        self,
        prompt: PromptType | None,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        prompt_token_ids: list[int] | None = None,
        lora_request: Any = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        arrival_time: float | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Yield one output, the vector of `prompt`; leaving early or cancelling the task aborts it in the core.

        `truncate_prompt_tokens` takes the place of that in `pooling_params`. Raises what `generate` raises, and
        EngineGenerateError also when the request is aborted by its id: there is no vector to yield then.
        """
        if isinstance(pooling_params, SamplingParams):
            raise TypeError("pooling_params must be PoolingParams, got SamplingParams; call generate() for text")
        params = PoolingParams() if pooling_params is None else pooling_params
        if truncate_prompt_tokens is not None and isinstance(params, PoolingParams):
            params = msgspec.structs.replace(params, truncate_prompt_tokens=truncate_prompt_tokens)
        stream = await self.add_request(
            request_id,
            prompt,
            params,
            arrival_time,
            prompt_token_ids=prompt_token_ids,
            lora_request=lora_request,
            trace_headers=trace_headers,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
        )
        async with contextlib.aclosing(stream):
            async for output in stream:
                yield output

    async def add_request(
        self,
        request_id: str | None,
        prompt: PromptType | None,
        params: SamplingParams | PoolingParams | None = None,
        arrival_time: float | None = None,
        *,
        prompt_token_ids: list[int] | None = None,
        lora_request: Any = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        prompt_adapter_request: Any = None,
    ) -> AsyncGenerator[Any, None]:
        """Admit a request now and return its stream: what `generate`, or with PoolingParams `encode`, would yield.

        Raises what `generate` raises.
        """
        for name, value in (
            ("lora_request", lora_request),
            ("trace_headers", trace_headers),
            ("data_parallel_rank", data_parallel_rank),
            ("prompt_adapter_request", prompt_adapter_request),
        ):
            if value is not None:
                raise NotImplementedError(f"{name} is not served yet; leave it None")
        if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**31) <= priority < 2**31:
            raise ValueError(f"priority must be an integer of 32 bits, got {priority!r}")
        if priority and self.vllm_config.scheduler_config.policy != "priority":
            raise ValueError(f"priority={priority} needs an engine with scheduling_policy='priority'")
        if params is not None and not isinstance(params, SamplingParams | PoolingParams):
            raise TypeError(f"params must be SamplingParams or PoolingParams, got {type(params).__name__}")
        self._attach()
        if request_id is None:
            request_id = uuid.uuid4().hex
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a str, got {request_id!r}")
        self._requests.reserve(request_id)
        try:
            stream = await self._admit(
                request_id,
                prompt,
                prompt_token_ids,
                params,
                priority,
                time.time() if arrival_time is None else arrival_time,
                tokenization_kwargs or {},
            )
        except BaseException:
            self._requests.cancel(request_id)
            raise
        outputs = self._consume(stream)
        # Begun now, so that it aborts the request also when nobody ever takes an output.
        await anext(outputs)
        return outputs

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End these requests. Unknown ids are no error.

        Streams of text end with finish_reason "abort"; those of vectors, which have none, raise EngineGenerateError.
        """
        self._attach()
        for one in [request_id] if isinstance(request_id, str) else list(request_id):
            stream = self._requests.find(one)
            if stream is not None:
                self._abort(stream)
            else:
                self._requests.abort_early(one)

    async def check_health(self) -> None:
        """Return if the core is well.

        Raises EngineDeadError when it is gone for good, and EngineError when it does not answer in time: because it
        hangs, or because it has died and the next is not ready yet.
        """
        self._attach()
        try:
            await self._link.call("ping", _PING_TIMEOUT_S)
        except TimeoutError as error:
            if (cause := self._link.recovers_from) is not None:
                raise EngineError(f"the core has died, and the next does not serve yet: {cause}") from error
            status = self._supervisor.status()
            limit = self.vllm_config.liveness_config.engine_iteration_timeout_s
            if status and status.state in (CoreState.STEPPING, CoreState.LOADING) and status.heartbeat_age < limit:
                return  # in a long step or waking up, and so slow to answer
            raise EngineError(f"the core has not answered for {_PING_TIMEOUT_S:g} s: {status}") from error

    async def core_status(self) -> dict[str, Any]:
        """The core's incarnation, pid, restarts, running and waiting requests, KV blocks, heartbeat age, standby."""
        status: dict[str, Any] = await self._ask("status")
        page = self._supervisor.status()
        status["incarnation"] = self._link.incarnation
        status["restarts"] = self._supervisor.num_restarts
        status["standby_pid"] = self._supervisor.standby_pid
        status["heartbeat_age"] = page.heartbeat_age if page else None
        return status

    async def reset_prefix_cache(self, device: Any = None) -> None:
        """Let later requests find nothing of earlier ones in the cache; `device` is accepted for vLLM's callers."""
        await self._ask("reset_prefix_cache")

    async def pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """Stop the engine from generating until `resume_generation`; what arrives meanwhile is accepted and waits.

        `mode` says what becomes of the requests that are live: "abort" ends them with finish_reason "abort", "wait"
        lets them end and returns when the last one has, "keep" freezes them until the engine is resumed. `clear_cache`
        sees to it that no key or value from before the pause is used after it, as a change of the weights asks for:
        the prefix cache is forgotten, and what "keep" has frozen is computed anew.

        The pause holds for every client of a shared core, also when this one has left. Pausing a paused engine again
        applies the new mode to the requests that have not been waiting since the pause; "abort" ends also those.
        Cancelling the call does not undo the pause. Raises ValueError for another mode, and EngineError when the engine
        is resumed, or paused with "keep", while this call waits.
        """
        if mode not in wire.PAUSE_MODES:
            raise ValueError(f"mode must be one of {', '.join(wire.PAUSE_MODES)}, got {mode!r}")
        if not isinstance(clear_cache, bool):
            raise TypeError(f"clear_cache must be True or False, got {clear_cache!r}")
        if mode == "wait":
            self._attach()
            await self._link.call("pause", None, mode, clear_cache)
        else:
            await self._ask("pause", mode, clear_cache)

    async def resume_generation(self) -> None:
        """End a pause, whoever began it; of an engine that is not paused, nothing."""
        await self._ask("resume")

    async def is_paused(self) -> bool:
        """Whether `pause_generation` has been called, by any client, and not `resume_generation` since."""
        return bool((await self.core_status())["is_paused"])

    async def start_profile(self) -> None:
        """Let PyTorch's profiler note what the core does in its next steps, at most 256 of them.

        Raises EngineError when it does so already.
        """
        await self._ask("start_profile")

    async def stop_profile(self) -> str:
        """End what `start_profile` began, and write it as a trace that Chrome and Perfetto show.

        Returns the folder that it is in, on the core's machine: that which the environment variable
        VLLM_TORCH_PROFILER_DIR names to the core, else one for temporary files, which is left to the caller. A core
        that dies takes its notes with it. Raises EngineError when `start_profile` has not been called.
        """
        folder: str = await self._ask("stop_profile")
        return folder

    async def sleep(self, level: int = 1, mode: str = "keep") -> None:
        """Give the memory of the KV cache and of the weights to others until `wake_up`.

        `level` 1 keeps the weights in host memory, where on a CPU they are anyway; 2 keeps none, and `wake_up` loads
        them again. Returns when the memory is free. Requests that are live are held and go on after the wake-up as if
        nothing had been, or with `mode` "abort" end with finish_reason "abort"; what arrives meanwhile is accepted and
        waits. The prefix cache is forgotten.

        The sleep holds for every client of a shared core, also when this one has left, and beside a pause: only when
        both have ended does generation go on. A core that sleeps already goes to the deeper of the two levels.
        Cancelling the call does not undo it. Raises ValueError for another level or mode, and EngineError when the host
        has no room for the weights; the engine goes on then.
        """
        if type(level) is not int or level not in wire.SLEEP_LEVELS:
            raise ValueError(
                f"level must be 1, which keeps the weights in host memory, or 2, which keeps none, got {level!r}"
            )
        if mode not in wire.SLEEP_MODES:
            raise ValueError(
                f"mode must be one of {', '.join(wire.SLEEP_MODES)}, got {mode!r}; to let requests end, call "
                "pause_generation('wait') before"
            )
        self._attach()
        await self._link.call("sleep", None, level, mode)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """End a sleep, whoever began it; of an engine that is awake, nothing.

        With `tags` only what they name comes back, of "weights" and "kv_cache"; when both are there, generation goes
        on. Returns when it is done, which after level 2 takes as long as loading the model does; meanwhile the core
        answers nothing else. Raises ValueError for other tags, and EngineError when there is no memory or the weights
        cannot be read: the engine sleeps on then, without what this call has taken, and may be woken again.
        """
        if tags is not None and (isinstance(tags, str) or not tags or any(tag not in wire.SLEEP_TAGS for tag in tags)):
            raise ValueError(f"tags must be a list of {' and '.join(wire.SLEEP_TAGS)}, or None for both, got {tags!r}")
        self._attach()
        await self._link.call("wake_up", None, *(tag for tag in wire.SLEEP_TAGS if tags is None or tag in tags))

    async def is_sleeping(self) -> bool:
        """Whether `sleep` has been called, by any client, and not everything has been woken up since."""
        return bool((await self.core_status())["is_sleeping"])

    async def wait_for_requests_to_drain(self, timeout: float = 300) -> None:
        """Return when this client has no unfinished request and the core has released what they held.

        Raises TimeoutError, which says how many are left, after `timeout` seconds.
        """
        self._attach()
        deadline = time.monotonic() + timeout
        # Looked at now and then, so that nobody on the way of every token has to announce it.
        while len(self._requests) or self._requests.num_slots_in_use:
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"after {timeout:g} s {len(self._requests)} requests have not ended, and the core has "
                    f"{self._requests.num_slots_in_use} to release; wait for longer, or abort them"
                )
            await asyncio.sleep(_DRAIN_POLL_S)
            self._attach()

    async def do_log_stats(self) -> None:
        """Write a line about throughput and load to the log now; without a call, one comes every ten seconds."""
        self._log_stats()

    async def get_num_unfinished_requests(self) -> int:
        """Requests whose streams have not ended."""
        return len(self._requests)

    @property
    def is_running(self) -> bool:
        return self._accepts and not self.is_stopped

    @property
    def is_stopped(self) -> bool:
        return self._is_shut_down or self.errored

    @property
    def errored(self) -> bool:
        return self._supervisor.end is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the core is gone for good; None while it is not."""
        return self._link.dead_error

    def start_background_loop(self) -> None:
        """Accept requests, after `start_engine_loop=False`."""
        self._accepts = True

    def get_tokenizer(self, lora_request: Any = None) -> Any:
        """The Hugging Face tokenizer; `await` on the result gives the same object."""
        if self._tokenizer is None:
            raise ValueError("the engine has no tokenizer, because of skip_tokenizer_init=True")
        return self._tokenizer

    async def get_vllm_config(self) -> VllmConfig:
        return self.vllm_config

    async def get_model_config(self) -> ModelConfig:
        return self.vllm_config.model_config

    async def get_parallel_config(self) -> ParallelConfig:
        return self.vllm_config.parallel_config

    async def get_scheduler_config(self) -> SchedulerConfig:
        return self.vllm_config.scheduler_config

    async def get_lora_config(self) -> LoRAConfig | None:
        return self.vllm_config.lora_config

    async def get_decoding_config(self) -> DecodingConfig:
        return self.vllm_config.decoding_config

    def shutdown(self, timeout: float | None = None) -> None:
        """End the core, by force after `timeout` seconds, and leave nothing behind; live streams fail. Idempotent.

        A core that `connect` attached to goes on without this client's requests.
        """
        if self._is_shut_down:
            return
        self._is_shut_down = True
        self._finalizer.detach()
        if self._microbatch is not None:
            self._microbatch.close()
        self._link.close(EngineDeadError("the engine was shut down"), timeout)

    def shutdown_background_loop(self) -> None:
        """`shutdown` under its older name."""
        self.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self.shutdown()

    async def _admit(
        self,
        request_id: str,
        prompt: PromptType | None,
        prompt_token_ids: list[int] | None,
        params: SamplingParams | PoolingParams | None,
        priority: int,
        arrival_time: float,
        tokenization_kwargs: dict[str, Any],
    ) -> RequestStream:
        """Tokenize, check, and send the request to the core."""
        given = (request_id, prompt, prompt_token_ids)
        rest = (priority, arrival_time, tokenization_kwargs)
        try:
            if isinstance(params, PoolingParams):
                stream, messages = await self._inputs.pooling(*given, params, *rest)
            else:
                stream, messages = await self._inputs.generation(*given, params, *rest)
        except Exception:
            self._attach()  # which says so if there is no engine any more
            raise
        self._attach()
        if self._requests.was_aborted_early(request_id):
            self._requests.cancel(request_id)
            stream.end_all("abort")
            return stream
        self._link.add(stream, messages)
        self._log_request(stream)
        return stream

    async def _consume(self, stream: RequestStream) -> AsyncGenerator[Any, None]:
        """Outputs, after a None that shows that it has begun."""
        try:
            yield None
            while True:
                output = await stream.next()
                yield output
                if output.finished:
                    return
        finally:
            self._abort(stream)

    def _abort(self, stream: RequestStream) -> None:
        if not stream.is_over:
            self._link.abort(stream)

    def _attach(self) -> None:
        """Make the running loop the one that hears from the core; raises EngineDeadError if there is no core."""
        self._link.attach()
        if not self._accepts:
            raise EngineError("start_engine_loop was False: call start_background_loop() first")

    async def _ask(self, name: str, *args: wire.CallArgument) -> Any:
        """Run an operation that a core answers between two steps; raises EngineError when it does not."""
        self._attach()
        limit = self.vllm_config.liveness_config.engine_iteration_timeout_s
        try:
            return await self._link.call(name, limit, *args)
        except TimeoutError as error:
            raise EngineError(f"the core has not answered for {limit:g} s: {self._supervisor.status()}") from error

    def _count_tokens(self, count: int) -> None:
        if self._stats.count(count) and not self._is_quiet:
            self._log_stats()

    def _log_stats(self) -> None:
        status = self._supervisor.status()
        free = status.free_blocks / status.total_blocks if status and status.total_blocks else None
        self._stats.write(len(self._requests), free)

    def _log_request(self, stream: RequestStream) -> None:
        config = self.vllm_config.observability_config
        if config.disable_log_requests or not logger.isEnabledFor(logging.INFO):
            return
        logger.info(
            "request %s: prompt %r (%d tokens), %s",
            stream.request_id,
            None if stream.prompt is None else stream.prompt[: config.max_log_len],
            len(stream.prompt_token_ids),
            stream.pooling if isinstance(stream, PoolingStream) else stream.params,
        )


def _load_tokenizer(config: ModelConfig) -> Any:
    """The tokenizer, of a class that can be awaited too, as callers of either form of `get_tokenizer` expect."""
    if config.skip_tokenizer_init:
        return None
    tokenizer = load_tokenizer(
        Path(config.tokenizer),
        mode=config.tokenizer_mode,
        trust_remote_code=config.trust_remote_code,
        chat_template=config.chat_template,
        cache_dir=cache_root(),
    )
    kind = type(tokenizer)

    def wait(self: Any) -> Generator[Any, None, Any]:
        yield from ()
        return self

    tokenizer.__class__ = type(kind.__name__, (kind,), {"__await__": wait, "__module__": kind.__module__})
    return tokenizer


def _release(supervisor: CoreSupervisor, microbatch: AsyncMicrobatchTokenizer | None) -> None:
    """End everything that an engine holds, when it is collected or at the end of the interpreter."""
    if microbatch is not None:
        microbatch.close()
    supervisor.stop()


AsyncLLMEngine = AsyncLLM
"""The same class under its older name."""
