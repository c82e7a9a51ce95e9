"""The asyncio client of an engine."""

import time
import types
import uuid
import weakref
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any, Self

import msgspec

from vllm_mp.client.engine.launcher import CoreLauncher, RemoteCore
from vllm_mp.client.engine.supervisor import CoreSupervisor, RestartLimit
from vllm_mp.client.engine_control import EngineControl
from vllm_mp.client.input_processor import InputProcessor, check_unserved
from vllm_mp.client.microbatch_tokenizer import AsyncMicrobatchTokenizer
from vllm_mp.client.output_iterator import OutputIterator
from vllm_mp.client.outputs.stream import RequestStream
from vllm_mp.client.prompt import PromptType
from vllm_mp.client.request import CallerRequest
from vllm_mp.client.stream_group import StreamGroup
from vllm_mp.client.tokenizer import load_awaitable_tokenizer
from vllm_mp.config import VllmConfig
from vllm_mp.engine_args import EngineArgs
from vllm_mp.errors import EngineDeadError
from vllm_mp.outputs import PoolingRequestOutput, RequestOutput
from vllm_mp.pooling_params import PoolingParams
from vllm_mp.sampling_params import SamplingParams


class AsyncLLM(EngineControl):
    """An engine: this asyncio half, and the core process that runs the model.

    Create it with `from_engine_args`, or attach to a running core with `connect`. It may be created before any event
    loop runs. Requests belong to the loop in which they are made; only one loop at a time may use the engine.
    """

    def __init__(self, supervisor: CoreSupervisor, tokenizer: Any) -> None:
        """`tokenizer` is None with skip_tokenizer_init."""
        self._tokenizer = tokenizer
        self._microbatch = AsyncMicrobatchTokenizer(tokenizer) if tokenizer is not None else None
        self._inputs = InputProcessor(supervisor.core.config, tokenizer, self._microbatch)
        self._finalizer = weakref.finalize(self, _release, supervisor, self._microbatch)
        super().__init__(supervisor)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: Any = None,
    ) -> Self:
        """Start a core and return when it is ready; works with and without a running event loop.

        With `start_engine_loop=False` the core starts too, but requests are refused until `start_background_loop` is
        called. `usage_context` is accepted for older callers and has no effect. Raises ValueError for options that
        cannot work and EngineStartError, with the cause, if the core does not start.
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
        """Start a core from a resolved configuration, as `from_engine_args` does."""
        check_unserved(stat_loggers=stat_loggers or None)
        limits = vllm_config.liveness_config
        restarts = RestartLimit(limits.max_core_restarts, limits.core_restart_window_s) if limits.recovery else None
        source, core = CoreLauncher(vllm_config), None
        try:
            source.begin()
            # The tokenizer loads while the core starts.
            tokenizer = load_awaitable_tokenizer(vllm_config.model_config)
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

        `key_file` is needed for TCP. `tokenizer` is the folder of the tokenizer, if it differs from the core's.
        Several clients may share a core; `shutdown` leaves it running. After its death, streams wait up to
        `reconnect_timeout` seconds for another core that serves the same model at the address, and continue there.
        """
        source = RemoteCore(address, key_file, timeout)
        core = source.finish(lambda: None)
        source.timeout = reconnect_timeout
        # The operator of the core limits how often it restarts.
        restarts = RestartLimit(None, 1.0) if reconnect_timeout > 0 else None
        try:
            if tokenizer is not None:
                core.config.model_config.tokenizer = tokenizer
            return cls(CoreSupervisor(source, core, restarts), load_awaitable_tokenizer(core.config.model_config))
        except BaseException:
            core.connection.close()
            raise

    def generate(
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
        """Stream the completions of `prompt`; leaving the loop early or cancelling the task aborts them in the core.

        Without `sampling_params`, the model's generation_config.json applies. Each output has all `n` completions, or
        with DELTA the completions that have new tokens or an end.
        Raises ValueError or TypeError for a request that cannot run, NotImplementedError for a feature that is not
        served, EngineGenerateError if this request fails, and EngineDeadError if the core is gone for good.
        """

        async def start() -> OutputIterator:
            if isinstance(sampling_params, PoolingParams):
                raise TypeError("sampling_params must be SamplingParams, got PoolingParams; call encode() for a vector")
            return await self.add_request(
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

        return OutputIterator(self._abandon, start)

    def encode(
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
        """Yield one output, the vector of `prompt`; leaving early or cancelling the task aborts the request.

        `truncate_prompt_tokens` overrides the field of `pooling_params`. Raises what `generate` raises, and
        EngineGenerateError also if the request is aborted by its id, because then there is no vector to yield.
        """

        async def start() -> OutputIterator:
            if isinstance(pooling_params, SamplingParams):
                raise TypeError("pooling_params must be PoolingParams, got SamplingParams; call generate() for text")
            params = PoolingParams() if pooling_params is None else pooling_params
            if truncate_prompt_tokens is not None and isinstance(params, PoolingParams):
                params = msgspec.structs.replace(params, truncate_prompt_tokens=truncate_prompt_tokens)
            return await self.add_request(
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

        return OutputIterator(self._abandon, start)

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
    ) -> OutputIterator:
        """Send a request now and return its outputs: what `generate`, or with PoolingParams `encode`, would yield.

        Raises what `generate` raises.
        """
        check_unserved(
            lora_request=lora_request,
            trace_headers=trace_headers or None,
            data_parallel_rank=data_parallel_rank,
            prompt_adapter_request=prompt_adapter_request,
        )
        self._inputs.check(params, priority)
        self._attach()
        request_id = uuid.uuid4().hex if request_id is None else request_id
        arrival_time = time.time() if arrival_time is None else arrival_time
        self._requests.reserve(request_id)
        given = CallerRequest(request_id, prompt, prompt_token_ids, priority, arrival_time, tokenization_kwargs or {})
        try:
            try:
                if isinstance(params, PoolingParams):
                    stream: RequestStream = await self._inputs.pooling(given, params)
                else:
                    stream = await self._inputs.generation(given, params)
            except Exception:
                self._attach()  # raises the error to report if the engine was shut down meanwhile
                raise
            self._attach()
            is_sent = self._core_client.add(stream)
        except BaseException:
            self._requests.cancel(request_id)
            raise
        if is_sent:
            self._stats.log_request(stream)
        return OutputIterator(self._abandon, None, stream)

    def stream_group(self) -> StreamGroup:
        """Return an empty group of requests, which one consumer reads with less work per token than `generate`."""
        return StreamGroup(self.add_request, self._abandon)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End these requests; unknown ids are ignored.

        Streams of text end with finish_reason "abort". Streams of vectors raise EngineGenerateError, because they have
        no finish_reason.
        """
        self._attach()
        for each in [request_id] if isinstance(request_id, str) else list(request_id):
            self._core_client.abort(each)

    def get_tokenizer(self, lora_request: Any = None) -> Any:
        """Return the Hugging Face tokenizer; `await` on the result gives the same object.

        Raises ValueError for a `lora_request`, and if the engine has no tokenizer.
        """
        if lora_request is not None:
            raise ValueError(f"lora_request must be None, got {lora_request!r}: LoRA is not enabled; leave it None")
        if self._tokenizer is None:
            raise ValueError("the engine has no tokenizer, because of skip_tokenizer_init=True; leave it False")
        return self._tokenizer

    def shutdown(self, timeout: float | None = None) -> None:
        """End the core, by force after `timeout` seconds, and remove its files; live streams fail. Idempotent.

        A shared core, as with `connect`, continues without this client's requests.
        """
        if self._is_shut_down:
            return
        self._is_shut_down = True
        self._finalizer.detach()
        if self._microbatch is not None:
            self._microbatch.close()
        self._core_client.close(EngineDeadError("the engine was shut down"), timeout)

    def shutdown_background_loop(self) -> None:
        """Call `shutdown`, of which this is the older name."""
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

    def _abandon(self, stream: RequestStream) -> None:
        """Abort the request of a stream that has lost its consumer; from any thread."""
        self._core_client.abandon(stream)


def _release(supervisor: CoreSupervisor, microbatch: AsyncMicrobatchTokenizer | None) -> None:
    """End everything that an engine holds, when it is garbage-collected or when the interpreter exits."""
    if microbatch is not None:
        microbatch.close()
    supervisor.stop()


AsyncLLMEngine = AsyncLLM
"""The same class under its older name."""
