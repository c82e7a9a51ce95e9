"""The asyncio client of an engine."""

import asyncio
import contextlib
import logging
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import Any, Self

import msgspec

from vllm_mp.client.background_call import call_in_thread
from vllm_mp.client.engine.launcher import CoreLauncher, RemoteCore
from vllm_mp.client.engine.restart_limit import RestartLimit
from vllm_mp.client.engine.supervisor import CoreSupervisor
from vllm_mp.client.engine_control import EngineControl
from vllm_mp.client.engine_end import EngineEnd
from vllm_mp.client.input_processor import InputProcessor, check_unserved
from vllm_mp.client.output_iterator import OutputIterator
from vllm_mp.client.outputs.stream import RequestStream
from vllm_mp.client.prompt import PromptType, TooManyTokensError, parse_prompt
from vllm_mp.client.prompt_tokenizer import PromptTokenizer
from vllm_mp.client.request import CallerRequest
from vllm_mp.client.stream_group import StreamGroup
from vllm_mp.client.tokenizer import load_awaitable_tokenizer
from vllm_mp.client.tokenizer_data import tokenizer_of_connected
from vllm_mp.client.tracing import RequestTracer, check_trace_headers
from vllm_mp.config import ModelConfig, VllmConfig
from vllm_mp.engine_args import EngineArgs
from vllm_mp.operator_key import read_operator_key
from vllm_mp.outputs import PoolingRequestOutput, RequestOutput
from vllm_mp.pooling_params import PoolingParams
from vllm_mp.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class AsyncLLM(EngineControl):
    """An engine: this asyncio half, and the core process that runs the model.

    Create it with `from_engine_args`, or attach to a running core with `connect`. It may be created before any event
    loop runs. Requests belong to the loop in which they are made; only one loop at a time may use the engine.
    """

    def __init__(
        self,
        supervisor: CoreSupervisor,
        prompt_tokenizer: PromptTokenizer | None,
        tracer: RequestTracer | None = None,
    ) -> None:
        """`prompt_tokenizer` is None with skip_tokenizer_init; both it and `tracer` are closed with the engine."""
        self._tracer = tracer
        self._has_warned_of_headers = False
        self._prompt_tokenizer = prompt_tokenizer
        self._inputs = InputProcessor(supervisor.core.config, prompt_tokenizer)
        super().__init__(supervisor, EngineEnd(self, supervisor, prompt_tokenizer, tracer))
        if tracer is not None:
            self.stats.add_listener(tracer)

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
        engine = cls._launch(vllm_config, lambda: None)
        engine._accepts = start_engine_loop
        return engine

    @classmethod
    async def start(cls, engine_args: EngineArgs) -> Self:
        """Start a core as `from_engine_args` does, without blocking the running loop; cancelling the call ends it.

        Raises what `from_engine_args` raises.
        """
        is_cancelled = threading.Event()

        def check() -> None:
            if is_cancelled.is_set():
                raise _Cancelled

        def launch() -> Any:
            config = engine_args.create_engine_config()
            check()
            return cls._launch(config, check)

        starting = call_in_thread(launch)
        try:
            engine: Self = await asyncio.shield(starting)
            return engine
        except asyncio.CancelledError:
            is_cancelled.set()
            with contextlib.suppress(Exception):  # the start has failed, because of the cancellation or on its own
                await (await starting).aclose()
            raise

    @classmethod
    def _launch(cls, vllm_config: VllmConfig, check: Callable[[], None]) -> Self:
        """Start a core and return the engine when it is ready. `check` is called meanwhile, and raises to end that."""
        limits = vllm_config.liveness_config
        restarts = RestartLimit(limits.max_core_restarts, limits.core_restart_window_s) if limits.recovery else None
        tracer = _tracer(vllm_config, vllm_config.observability_config.otlp_traces_endpoint)
        source, core = CoreLauncher(vllm_config), None
        try:
            source.begin()
            # The tokenizer loads while the core starts.
            prompt_tokenizer = _load_prompt_tokenizer(vllm_config.model_config)
            core = source.finish(check)
            return cls(CoreSupervisor(source, core, restarts), prompt_tokenizer, tracer)
        except BaseException:
            source.close(None, core)
            if tracer is not None:
                tracer.close()
            raise

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        key_file: str | None = None,
        core_owner: str | None = None,
        operator_key_file: str | None = None,
        timeout: float = 30.0,
        tokenizer: str | None = None,
        trust_remote_code: bool = False,
        reconnect_timeout: float = 300.0,
        disable_log_requests: bool = True,
        max_log_len: int | None = None,
        otlp_traces_endpoint: str | None = None,
    ) -> Self:
        """Attach to a core that `vllm-mp engine --listen ADDRESS` serves, waiting `timeout` seconds for it.

        Over a Unix socket, time in which the core gets on with its load does not count.

        `key_file`, made by `vllm-mp keys client`, is needed for TCP. A Unix socket must belong to this user, to root or
        to `core_owner`, and its folder must not be writable by others, unless it is sticky. `operator_key_file`, a copy
        of the core's, makes this client an operator, which may pause the core and make other calls that affect all its
        clients; without it such a call raises NotOperatorError. Several clients may share a core; `shutdown` leaves it
        running. After its death, streams wait up to `reconnect_timeout` seconds for another core of the same model at
        the address, and continue there.

        `tokenizer` names a folder or hub id of this client's own, whose code runs only with `trust_remote_code`.
        Without it, the core sends its tokenizer, of which no code runs. `disable_log_requests`, `max_log_len` and
        `otlp_traces_endpoint` are the engine's options of these names; the core's options do not apply to this client.

        Raises EngineStartError if the core does not serve, and ValueError for arguments that cannot work or a tokenizer
        that cannot be used.
        """
        operator_key = read_operator_key(operator_key_file) if operator_key_file is not None else b""
        source = RemoteCore(address, key_file, timeout, operator_key, core_owner, reconnect_timeout)
        core = source.finish(lambda: None)
        core.config.observability_config.disable_log_requests = disable_log_requests
        core.config.observability_config.max_log_len = max_log_len
        try:
            loaded = tokenizer_of_connected(core, timeout, tokenizer, trust_remote_code)
            prompt_tokenizer = PromptTokenizer(loaded) if loaded is not None else None
            tracer = _tracer(core.config, otlp_traces_endpoint)
            return cls(CoreSupervisor(source, core, None), prompt_tokenizer, tracer)
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
        self._check_process()
        check_unserved(
            lora_request=lora_request,
            data_parallel_rank=data_parallel_rank,
            prompt_adapter_request=prompt_adapter_request,
        )
        trace_context = self._trace_context(trace_headers)
        self._inputs.check(params, priority)
        self._attach()
        request_id = uuid.uuid4().hex if request_id is None else request_id
        arrival_time = time.time() if arrival_time is None else float(arrival_time)
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
            self.stats.note_sent(stream, arrival_time, trace_context)
            self._stat_logger.log_request(stream)
        else:
            self.stats.note_unsent()
        return OutputIterator(self._abandon, None, stream)

    def stream_group(self) -> StreamGroup:
        """Return an empty group of requests, which one consumer reads with less work per token than `generate`."""
        self._check_process()
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
        return self._tokenizes().tokenizer

    async def tokenize(self, text: str, **options: Any) -> list[int]:
        """Return the token ids of `text`, as the tokenizer called with `options` gives them.

        Raises ValueError for text that is not valid Unicode, and if the engine has no tokenizer.
        """
        prompt_tokenizer = self._tokenizes()
        parsed = parse_prompt(text).text
        assert parsed is not None
        return await prompt_tokenizer.ids(parsed, options)

    async def has_room(self, text: str, num_output_tokens: int, **options: Any) -> bool:
        """Return whether the context has room for `text`, tokenized with `options`, and for that many output tokens.

        A text that cannot fit, by its size, is not tokenized. Raises what `tokenize` raises.
        """
        prompt_tokenizer = self._tokenizes()
        parsed = parse_prompt(text).text
        assert parsed is not None
        try:
            await prompt_tokenizer.ids(parsed, options, self.model_config.max_model_len - num_output_tokens)
        except TooManyTokensError:
            return False
        return True

    async def detokenize(self, token_ids: list[int], **options: Any) -> str:
        """Return the text of `token_ids`, as the tokenizer's `decode` with `options` gives it.

        Raises ValueError for ids outside the vocabulary, and if the engine has no tokenizer.
        """
        prompt_tokenizer = self._tokenizes()
        vocab_size = len(prompt_tokenizer.tokenizer)
        for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"token ids must be in [0, {vocab_size}), the tokenizer's vocabulary, got {token_id}")
        return await prompt_tokenizer.decode(token_ids, options)

    def _abandon(self, stream: RequestStream) -> None:
        """Abort the request of a stream that has lost its consumer; from any thread."""
        self._core_client.abandon(stream)

    async def is_tracing_enabled(self) -> bool:
        """Return whether spans of requests are sent to a collector."""
        self._check_process()
        return self.is_tracing

    @property
    def is_tracing(self) -> bool:
        """What `is_tracing_enabled` returns."""
        return self._tracer is not None

    def _trace_context(self, headers: Mapping[str, str] | None) -> dict[str, str]:
        """Return the headers that continue the caller's trace. Raises TypeError unless all are str."""
        context = check_trace_headers(headers)
        if context and not self.is_tracing and not self._has_warned_of_headers:
            self._has_warned_of_headers = True
            logger.warning("trace_headers have no effect: set otlp_traces_endpoint, or leave them out")
        return context

    def _tokenizes(self) -> PromptTokenizer:
        """Return the tokenizer. Raises ValueError if the engine has none, and RuntimeError in a forked child."""
        self._check_process()
        if self._prompt_tokenizer is None:
            raise ValueError("the engine has no tokenizer, because of skip_tokenizer_init=True; leave it False")
        return self._prompt_tokenizer


def _load_prompt_tokenizer(config: ModelConfig) -> PromptTokenizer | None:
    """Return the model's tokenizer; None with skip_tokenizer_init. Raises what `load_tokenizer` raises."""
    tokenizer = load_awaitable_tokenizer(config)
    return PromptTokenizer(tokenizer) if tokenizer is not None else None


class _Cancelled(Exception):
    """The start of an engine was cancelled."""


def _tracer(config: VllmConfig, endpoint: str | None) -> RequestTracer | None:
    return None if endpoint is None else RequestTracer(endpoint, config.model_config.served_model_name)


AsyncLLMEngine = AsyncLLM
"""The same class under its older name."""
