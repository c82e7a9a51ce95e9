"""The asyncio client of an engine."""

import asyncio
import contextlib
import itertools
import logging
import threading
import time
import types
import uuid
import weakref
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from vllm_mp import wire
from vllm_mp.client.core_connection import CoreConnection, run_on
from vllm_mp.client.core_process import CoreProcess
from vllm_mp.client.input_processor import InputProcessor
from vllm_mp.client.microbatch_tokenizer import AsyncMicrobatchTokenizer
from vllm_mp.client.pooling_stream import PoolingStream
from vllm_mp.client.prompt import PromptType
from vllm_mp.client.request_book import RequestBook
from vllm_mp.client.request_stream import RequestStream
from vllm_mp.client.stats_log import StatsLog
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
from vllm_mp.errors import EngineDeadError, EngineError, EngineStartError
from vllm_mp.model_files import cache_root
from vllm_mp.outputs import PoolingRequestOutput, RequestOutput
from vllm_mp.pooling_params import PoolingParams
from vllm_mp.sampling_params import SamplingParams
from vllm_mp.status_page import CoreState, CoreStatus, StatusPage

logger = logging.getLogger(__name__)

_PING_TIMEOUT_S = 5.0
_BYE_LINGER_MS = 500
_EXIT_GRACE_S = 1.0
_HANDOVER_TIMEOUT_S = 5.0
_DRAIN_POLL_S = 0.01


class AsyncLLM:
    """An engine: this asyncio half, and the core process that runs the model.

    Make one with `from_engine_args`, or attach to a running core with `connect`. It may be made before any event loop
    runs; requests belong to the loop that runs when they are made, one loop at a time.
    """

    def __init__(
        self, config: VllmConfig, connection: CoreConnection, process: CoreProcess | None, tokenizer: Any
    ) -> None:
        self.vllm_config = config
        self.model_config = config.model_config
        self._connection = connection
        self._process = process
        self._tokenizer = tokenizer
        self._microbatch = AsyncMicrobatchTokenizer(tokenizer) if tokenizer is not None else None
        self._inputs = InputProcessor(config, tokenizer, self._microbatch)
        self._requests = RequestBook()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()
        self._dead_error: EngineDeadError | None = None
        self._is_shut_down = False
        self._accepts = True
        self._stats = StatsLog()
        self._is_quiet = config.observability_config.disable_log_stats
        self._finalizer = weakref.finalize(self, _release, connection, process, self._microbatch)

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
        process = CoreProcess(vllm_config)
        connection = None
        try:
            connection = CoreConnection(process.address)
            # The tokenizer loads while the core does.
            tokenizer = _load_tokenizer(vllm_config.model_config)

            def check() -> None:
                if not process.is_alive():
                    raise EngineStartError(f"the engine did not start: {process.describe_end(log_stays=False)}")

            _, config = connection.greet(vllm_config.liveness_config.start_timeout_s, check)
            engine = cls(config, connection, process, tokenizer)
        except BaseException:
            _release(connection, process, None)
            raise
        engine._accepts = start_engine_loop
        return engine

    @classmethod
    def connect(
        cls, address: str, *, key_file: str | None = None, timeout: float = 30.0, tokenizer: str | None = None
    ) -> Self:
        """Attach to a core that `vllm-mp engine --listen ADDRESS` serves, waiting `timeout` seconds for it.

        `key_file` is needed for tcp. `tokenizer` is the folder of the tokenizer, if it does not lie where the core has
        it. Several clients may share a core; `shutdown` leaves it running.
        """
        connection = CoreConnection(address, key_file)
        try:
            _, config = connection.greet(timeout, lambda: None)
            if tokenizer is not None:
                config.model_config.tokenizer = tokenizer
            return cls(config, connection, None, _load_tokenizer(config.model_config))
        except BaseException:
            connection.close()
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

        Raises EngineDeadError when it is gone for good, and EngineError when it lives but has made no progress for
        `engine_iteration_timeout_s`, or answers nothing while it has nothing to do.
        """
        self._attach()
        try:
            await self._call("ping", _PING_TIMEOUT_S)
        except TimeoutError as error:
            status = self._read_status_page()
            limit = self.vllm_config.liveness_config.engine_iteration_timeout_s
            if status and status.state == CoreState.STEPPING and status.state_age < limit:
                return  # in a long step, and so slow to answer
            raise EngineError(f"the core has not answered for {_PING_TIMEOUT_S:g} s: {status}") from error

    async def core_status(self) -> dict[str, Any]:
        """What the core holds: incarnation, pid, restarts, running and waiting requests, KV blocks, heartbeat age."""
        status: dict[str, Any] = await self._ask("status")
        page = self._read_status_page()
        status["incarnation"] = self._connection.incarnation
        status["restarts"] = 0
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
            await self._call("pause", None, mode, clear_cache)
        else:
            await self._ask("pause", mode, clear_cache)

    async def resume_generation(self) -> None:
        """End a pause, whoever began it; of an engine that is not paused, nothing."""
        await self._ask("resume")

    async def is_paused(self) -> bool:
        """Whether `pause_generation` has been called, by any client, and not `resume_generation` since."""
        return bool((await self.core_status())["is_paused"])

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
        self._notice_death()
        return self._dead_error is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the core is gone for good; None while it is not."""
        self._notice_death()
        return self._dead_error

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
        try:
            self._fail_everything(EngineDeadError("the engine was shut down"))
        finally:
            _release(self._connection, self._process, self._microbatch, timeout)

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
        self._requests.enter(stream)
        num_sent = 0
        try:
            for answer, message in zip(stream.answers, messages, strict=True):
                message.incarnation, message.slot = self._connection.incarnation, answer.slot
                self._connection.send(message)
                num_sent += 1
        except BaseException:
            if slots := self._requests.withdraw(stream, num_sent):
                self._abort_in_core(slots)
            raise
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
            slots = self._requests.end_by_abort(stream)
            if not self.is_stopped:
                self._abort_in_core(slots)

    def _abort_in_core(self, slots: list[int]) -> None:
        self._connection.send(wire.AbortRequests(self._connection.incarnation, slots))

    def _attach(self) -> None:
        """Make the running loop the one that hears from the core; raises EngineDeadError if there is no core."""
        self._notice_death()
        if self._dead_error is not None:
            raise EngineDeadError(str(self._dead_error))
        if self._is_shut_down:
            raise EngineDeadError("the engine was shut down")
        if not self._accepts:
            raise EngineError("start_engine_loop was False: call start_background_loop() first")
        # The loop must not keep an engine alive that its owner has dropped.
        this = weakref.ref(self)

        def on_message(message: wire.CoreMessage) -> None:
            if (engine := this()) is not None:
                engine._on_message(message)

        def on_disconnect() -> None:
            if (engine := this()) is None:
                return
            cause = f"the connection to the core at {engine._connection.address} broke"
            if engine._process is None:
                engine._die(cause)
            else:
                # Most likely its process is ending, which is about to tell more.
                asyncio.get_running_loop().call_later(_EXIT_GRACE_S, die_of, cause)

        def die_of(cause: str) -> None:
            if (engine := this()) is not None:
                engine._notice_death()
                engine._die(cause)

        def on_exit() -> None:
            if (engine := this()) is not None:
                engine._notice_death()

        exit_watch = (self._process.pid_fd, on_exit) if self._process else None
        self._connection.attach(on_message, on_disconnect, exit_watch)

    def _on_message(self, message: wire.CoreMessage) -> None:
        if isinstance(message, wire.StepOutput):
            if unwanted := self._requests.take_in(message):
                self._abort_in_core(unwanted)
            if self._stats.count(len(message.tokens) // 4) and not self._is_quiet:
                self._log_stats()
        elif isinstance(message, wire.Reply):
            call = self._calls.pop(message.call_id, None)
            if call is not None and not call.done() and not call.get_loop().is_closed():
                if message.error is None:
                    call.set_result(message.result)
                else:
                    call.set_exception(EngineError(message.error))

    async def _ask(self, name: str, *args: wire.CallArgument) -> Any:
        """Run an operation that a core answers between two steps; raises EngineError when it does not."""
        self._attach()
        limit = self.vllm_config.liveness_config.engine_iteration_timeout_s
        try:
            return await self._call(name, limit, *args)
        except TimeoutError as error:
            raise EngineError(f"the core has not answered for {limit:g} s: {self._read_status_page()}") from error

    async def _call(self, name: str, timeout: float | None, *args: wire.CallArgument) -> Any:
        """Run an operation in the core; raises TimeoutError when it does not answer within `timeout` seconds."""
        call_id = next(self._call_ids)
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = reply
        self._connection.send(wire.Call(self._connection.incarnation, call_id, name, list(args)))
        try:
            async with asyncio.timeout(timeout):
                return await reply
        finally:
            self._calls.pop(call_id, None)

    def _notice_death(self) -> None:
        process = self._process
        if process is not None and self._dead_error is None and not self._is_shut_down and not process.is_alive():
            self._die(process.describe_end())

    def _die(self, cause: str) -> None:
        if self._dead_error is None and not self._is_shut_down:
            self._dead_error = EngineDeadError(cause)
            logger.error("%s", cause.partition(";")[0])  # the errors carry all of it
            self._fail_everything(self._dead_error)

    def _fail_everything(self, error: EngineDeadError) -> None:
        """End every stream and call with `error`, on the loop that they belong to, which may run in another thread."""
        done = threading.Event()

        def fail() -> None:
            self._connection.detach()
            self._requests.fail_all(error)
            for call in self._calls.values():
                if not call.done() and not call.get_loop().is_closed():
                    call.set_exception(EngineDeadError(str(error)))
            self._calls.clear()
            done.set()

        loop = self._connection.loop
        if loop is None:
            fail()
        else:
            run_on(loop, fail)
            done.wait(_HANDOVER_TIMEOUT_S)

    def _read_status_page(self) -> CoreStatus | None:
        """What the core's status page says; None where it cannot be seen."""
        page = None
        if self._process is not None:
            page = self._process.status_page()
        elif self._connection.address.startswith("ipc://"):
            page = StatusPage.open(Path(self._connection.address.removeprefix("ipc://") + ".status"))
        return page.read() if page else None

    def _log_stats(self) -> None:
        status = self._read_status_page()
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


def _release(
    connection: CoreConnection | None,
    process: CoreProcess | None,
    microbatch: AsyncMicrobatchTokenizer | None,
    timeout: float | None = None,
) -> None:
    """End everything that an engine holds; also called when it is collected and at the end of the interpreter."""
    if microbatch is not None:
        microbatch.close()
    if connection is not None:
        if process is None and connection.incarnation:
            with contextlib.suppress(Exception):
                connection.send(wire.Bye(connection.incarnation))
        connection.close(0 if process else _BYE_LINGER_MS)
    if process is not None:
        process.stop(timeout)


AsyncLLMEngine = AsyncLLM
"""The same class under its older name."""
