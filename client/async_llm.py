"""The asyncio client of an engine: every public method with its contract, and the object that carries it out.

They are in this order: making an engine, requests, its state, the operations that affect all clients, cores, adapters,
loggers, the tokenizer, and the end.
"""

# ruff: noqa: TC004 (`_import_rest` imports these names at runtime)
from __future__ import annotations

import functools
import importlib
import logging
import time
import types
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import msgspec

from vllm_mp.arguments.unserved_arguments import accepts_unserved, check_unserved
from vllm_mp.arguments.unserved_names import NO_RENDERER, WEIGHT_CALLS, refuse_attributes
from vllm_mp.arguments.unserved_table import CALL_ARGUMENTS
from vllm_mp.arguments.usage_context import UsageContext
from vllm_mp.client.engine_client import EngineClient
from vllm_mp.client.threads.background_call import call_in_thread
from vllm_mp.client.threads.completed_call import AwaitableInt, CompletedCall
from vllm_mp.core_link.early_template import template_beside_imports
from vllm_mp.requests.lora_request import LoRARequest
from vllm_mp.requests.pooling_params import PoolingParams
from vllm_mp.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllm_mp.client.engine.adapters import Adapters, checked_adapter
    from vllm_mp.client.engine.control import EngineControl
    from vllm_mp.client.engine.core_changes import CoreChanges
    from vllm_mp.client.engine.engine import Engine
    from vllm_mp.client.engine.input_preprocessor import InputPreprocessor
    from vllm_mp.client.engine.input_processor import InputProcessor, check_sampling_params
    from vllm_mp.client.engine.request_log import log_request
    from vllm_mp.client.engine.start import connect_engine, start_engine, start_engine_in_thread
    from vllm_mp.client.engine.status import EngineStatus
    from vllm_mp.client.engine.stream_group import StreamGroup
    from vllm_mp.client.engine.tokenizer import EngineTokenizer
    from vllm_mp.client.images.media import ImageSourceError
    from vllm_mp.client.images.sources import ImageSources
    from vllm_mp.client.outputs.detokenizer import token_bytes
    from vllm_mp.client.outputs.live_requests import LiveRequests
    from vllm_mp.client.outputs.output_iterator import OutputIterator
    from vllm_mp.client.outputs.stream import RequestStream
    from vllm_mp.client.prompts.chat_images import ChatImage, take_images
    from vllm_mp.client.prompts.chat_messages import ChatMessageError
    from vllm_mp.client.prompts.chat_template import ChatTemplate
    from vllm_mp.client.prompts.model_tokenizer import library_tokenizer
    from vllm_mp.client.prompts.prompt import PromptType, text_prompt
    from vllm_mp.client.prompts.request import CallerRequest, checked_request_id, checked_tenant
    from vllm_mp.client.stat_loggers import StatLoggerArgument
    from vllm_mp.client.stats import CoreReading
    from vllm_mp.client.stats.tracing import check_trace_headers
    from vllm_mp.config import DecodingConfig, LoRAConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
    from vllm_mp.config.engine_args import EngineArgs
    from vllm_mp.errors import EngineDeadError
    from vllm_mp.outputs import PoolingRequestOutput, RequestOutput
    from vllm_mp.validation.request_validation import check_generates, checked_arrival_time

_IMPORTED_BESIDE_CORE: Final = {
    "client.engine.adapters": ("Adapters", "checked_adapter"),
    "client.engine.control": ("EngineControl",),
    "client.engine.core_changes": ("CoreChanges",),
    "client.engine.input_preprocessor": ("InputPreprocessor",),
    "client.engine.input_processor": ("InputProcessor", "check_sampling_params"),
    "client.engine.request_log": ("log_request",),
    "client.engine.start": ("connect_engine", "start_engine", "start_engine_in_thread"),
    "client.engine.status": ("EngineStatus",),
    "client.engine.stream_group": ("StreamGroup",),
    "client.engine.tokenizer": ("EngineTokenizer",),
    "client.images.media": ("ImageSourceError",),
    "client.outputs.detokenizer": ("token_bytes",),
    "client.outputs.output_iterator": ("OutputIterator",),
    "client.prompts.chat_images": ("take_images",),
    "client.prompts.chat_messages": ("ChatMessageError",),
    "client.prompts.chat_template": ("ChatTemplate",),
    "client.prompts.model_tokenizer": ("library_tokenizer",),
    "client.prompts.prompt": ("text_prompt",),
    "client.prompts.request": ("CallerRequest", "checked_request_id", "checked_tenant"),
    "client.stats.tracing": ("check_trace_headers",),
    "validation.request_validation": ("check_generates", "checked_arrival_time"),
}
"""The names that only an engine needs, by their module: importing them takes longer than starting a process."""

logger = logging.getLogger(__name__)

_NO_LOOP = "the core is another process with a loop of its own; start_background_loop() begins to take requests"
_REFUSED = {
    **dict.fromkeys(
        ("background_loop", "engine", "engine_step", "process_request_outputs", "run_engine_loop", "start_engine_loop"),
        _NO_LOOP,
    ),
    "build_guided_decoding_logits_processor_async": "give structured_outputs in SamplingParams",
    "log_requests": "set disable_log_requests=False, or read vllm_config.observability_config",
    "set_errored": "errored and dead_error are what the engine has found out",
    **dict.fromkeys(
        ("engine_core", "input_processor", "output_processor", "output_handler", "processor"),
        "it is inside the engine; use the methods of AsyncLLM",
    ),
    "renderer": NO_RENDERER,
    "scale_elastic_ep": "give data_parallel_size to the engine when it starts",
    **WEIGHT_CALLS,
}
"""Names of vLLM's class, of this or an older version, that this class lacks, and what to use instead."""


class _LatePrompt(NamedTuple):
    """A prompt that is made once its request has its id, so that the request can be aborted meanwhile."""

    make: Callable[[], Awaitable[PromptType]]


class AsyncLLM(EngineClient):
    """An engine: this asyncio half, and the core processes, each of which runs the whole model.

    Create it with `from_engine_args`, or attach to a running core with `connect`. It may be created before any event
    loop runs. Requests belong to the loop in which they are made; only one loop at a time may use the engine.

    Methods that change a core for all its clients (`add_lora`, `remove_lora` and `pin_lora`; pauses, sleep, the prefix
    cache, the profiler, `collective_rpc`) raise NotOperatorError, and change nothing, unless this client is an operator
    of a shared core (`operator_key_file` of `connect`). Methods for LoRA adapters raise ValueError if LoRA is not
    enabled. A core is named by its rank: 0, 1 and so on in the order in which cores were given or added; the rank of a
    core that was removed is not used again.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Raise NotImplementedError for the arguments of vLLM's constructor, which needs no core that runs."""
        if wrong := {"vllm_config", "executor_class", "engine_args"} & kwargs.keys():
            raise NotImplementedError(
                f"AsyncLLM({min(wrong)}=...) is not served: an engine needs a core that runs; call "
                "AsyncLLM.from_engine_args(args) or AsyncLLM.from_vllm_config(config)"
            )
        _import_rest()
        return super().__new__(cls)

    def __init__(self, engine: Engine) -> None:
        """`engine` is what `from_engine_args` and `connect` make."""
        self._engine = engine
        self.vllm_config = engine.vllm_config
        self.model_config = engine.vllm_config.model_config
        self.stats = engine.stats
        """What this client counts; it needs no core to be read."""
        self.readings = engine.readings
        """The counters and the load of the cores, for readers in any thread."""
        self.cores = engine.cores
        self._inputs = InputProcessor(engine.vllm_config, engine.prompt_tokenizer, engine.images)
        self._tokenizer = EngineTokenizer(engine)
        self._adapters = Adapters(engine)
        self._status = EngineStatus(engine)
        self._control = EngineControl(engine)
        self._core_changes = CoreChanges(engine)
        self._has_warned_of_headers = False

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        start_engine_loop: bool = True,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: StatLoggerArgument = None,
    ) -> Self:
        """Start a core, or `data_parallel_size` of them, and return when all are ready; with or without a running loop.

        With `start_engine_loop=False` the core starts too, but requests are refused while the background loop is
        stopped: until `start_background_loop`, and after `shutdown_background_loop`. `usage_context` is accepted for
        callers of vLLM and has no effect. `stat_loggers` is a list of factories (classes, as a rule) that are called
        with the configuration and 0, or a dict of loggers by name. They are called beside the logger "logging", which
        `disable_log_stats` leaves out. Raises ValueError or TypeError for options that cannot work and
        EngineStartError, with the cause, if the core does not start.
        """
        with template_beside_imports(engine_args):
            config = engine_args.create_engine_config(usage_context)
            return cls.from_vllm_config(config, start_engine_loop, usage_context, stat_loggers)

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: VllmConfig,
        start_engine_loop: bool = True,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: StatLoggerArgument = None,
        enable_log_requests: bool | None = None,
        aggregate_engine_logging: bool = False,
        disable_log_stats: bool | None = None,
        *,
        disable_log_requests: bool | None = None,
    ) -> Self:
        """Start a core from a resolved configuration, as `from_engine_args` does.

        `disable_log_stats` and `disable_log_requests` take precedence over the configuration, which stays unchanged;
        `enable_log_requests` is the opposite of the latter and takes precedence over it. `aggregate_engine_logging` has
        no effect, because there is one core.
        """
        if enable_log_requests is not None:
            disable_log_requests = not enable_log_requests
        _import_rest()
        engine = start_engine(
            vllm_config,
            start_engine_loop,
            stat_loggers,
            disable_log_stats=disable_log_stats,
            disable_log_requests=disable_log_requests,
        )
        return cls(engine)

    @classmethod
    async def start(cls, engine_args: EngineArgs, stat_loggers: StatLoggerArgument = None) -> Self:
        """Start a core as `from_engine_args` does, without blocking the running loop; cancelling the call ends it.

        Raises what `from_engine_args` raises.
        """
        with template_beside_imports(engine_args):
            await call_in_thread(_import_rest)
            return cls(await start_engine_in_thread(engine_args, stat_loggers))

    @classmethod
    def connect(
        cls,
        address: str | Sequence[str],
        *,
        key_file: str | Sequence[str] | None = None,
        core_owner: str | None = None,
        operator_key_file: str | Sequence[str] | None = None,
        timeout: float = 30.0,
        tokenizer: str | None = None,
        trust_remote_code: bool = False,
        reconnect_timeout: float = 300.0,
        disable_log_requests: bool = True,
        max_log_len: int | None = None,
        otlp_traces_endpoint: str | None = None,
        seed: int | None = None,
    ) -> Self:
        """Attach to a core that `vllm-mp engine --listen ADDRESS` serves, waiting `timeout` seconds for it.

        `address` may be several addresses, a list or separated by commas, of cores that serve the same model: requests
        go where they wait least, and go on with another core when theirs dies. `key_file` and `operator_key_file` then
        name one file for all cores, or one for each. Over a Unix socket, time in which the core gets on with its load
        does not count.

        `key_file`, made by `vllm-mp keys client`, is needed for TCP. A Unix socket must belong to this user, to root or
        to `core_owner`, and its folder must not be writable by others, unless it is sticky. `operator_key_file`, a copy
        of the core's, makes this client an operator, which may pause the core and make other calls that affect all its
        clients; without it such a call raises NotOperatorError. Several clients may share a core; `shutdown` leaves it
        running. After its death, streams wait up to `reconnect_timeout` seconds for another core of the same model at
        the address, and continue there.

        `tokenizer` names a folder or hub id of this client's own, whose code runs only with `trust_remote_code`.
        Without it, the core sends its tokenizer, of which no code runs. `disable_log_requests`, `max_log_len` and
        `otlp_traces_endpoint` are the engine's options of these names; the core's options do not apply to this client.
        Requests without a seed draw theirs from `seed`; None: from a seed that this client alone draws from the core's,
        so that equal requests of several clients have different answers.

        Raises EngineStartError if the core does not serve, and ValueError for arguments that cannot work or a tokenizer
        that cannot be used.
        """
        _import_rest()
        engine = connect_engine(
            address,
            key_file=key_file,
            core_owner=core_owner,
            operator_key_file=operator_key_file,
            timeout=timeout,
            tokenizer=tokenizer,
            trust_remote_code=trust_remote_code,
            reconnect_timeout=reconnect_timeout,
            disable_log_requests=disable_log_requests,
            max_log_len=max_log_len,
            otlp_traces_endpoint=otlp_traces_endpoint,
            seed=seed,
        )
        return cls(engine)

    @classmethod
    async def aconnect(cls, address: str | Sequence[str], **options: Any) -> Self:
        """Do what `connect` does, with its `options`, without blocking the running loop.

        Cancelling the call ends it at once. A connection that is made later is closed by the garbage collector.
        """
        return await call_in_thread(lambda: cls.connect(address, **options))

    @accepts_unserved("AsyncLLM.generate", CALL_ARGUMENTS)
    def generate(
        self,
        prompt: PromptType | None,
        sampling_params: SamplingParams | None = None,
        request_id: str | int | None = None,
        prompt_text: str | LoRARequest | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: Any = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
        *,
        prompt_token_ids: list[int] | None = None,
        arrival_time: float | None = None,
        prompt_adapter_request: Any = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the completions of `prompt`; leaving the loop early or cancelling the task aborts them in the core.

        Without `sampling_params`, the model's generation_config.json applies. Each output has all `n` completions, or
        with DELTA the completions that have new tokens or an end. An int as `request_id` becomes a str, which the
        outputs carry. `prompt_text` is what outputs repeat as the prompt, in place of the prompt's own text; an adapter
        in its place, where callers of older versions of vLLM give it, is the `lora_request`. `lora_request` names the
        LoRA adapter that answers, which is loaded if need be; None: the base model.
        `tokenization_kwargs` are as in `LLM`.

        `arrival_time`, in seconds of `time.time()`, is by default the time of this call. Requests of this client that
        wait with the same priority run in its order; it has no effect on other clients.

        `data_parallel_rank` names the core that gets the request, by default the one where it waits least. While that
        core does not serve, or is drained, another one gets it, because running on another core is better than failing
        the request.

        Raises ValueError or TypeError for a request that cannot run, DuplicateRequestIdError if a live request has the
        id, NotImplementedError for a feature that is not served, EngineGenerateError if this request fails,
        NotOperatorError if only an operator may have its adapter loaded, and EngineDeadError if the core is gone for
        good, or the background loop is stopped and does not start by itself.
        """

        text, adapter = prompt_text, lora_request
        if isinstance(text, LoRARequest):
            text, adapter = None, text

        async def start() -> OutputIterator:
            check_sampling_params(sampling_params)
            return await self.add_request(
                request_id,
                prompt,
                sampling_params,
                arrival_time,
                adapter,
                tokenization_kwargs,
                trace_headers,
                priority,
                data_parallel_rank,
                session_id,
                text,
                reasoning_ended,
                reasoning_parser_kwargs,
                kv_hints,
                prompt_token_ids=prompt_token_ids,
                prompt_adapter_request=prompt_adapter_request,
            )

        return OutputIterator(self._attach, self._abandon, start)

    @accepts_unserved("AsyncLLM.encode", CALL_ARGUMENTS)
    def encode(
        self,
        prompt: PromptType | None,
        pooling_params: PoolingParams | None = None,
        request_id: str | int | None = None,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: dict[str, Any] | None = None,
        reasoning_ended: bool | None = None,
        *,
        prompt_token_ids: list[int] | None = None,
        truncate_prompt_tokens: int | None = None,
        arrival_time: float | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Yield one output, the vector of `prompt`; leaving early or cancelling the task aborts the request.

        `truncate_prompt_tokens` overrides the field of `pooling_params`; other arguments are as in `generate`. Raises
        what `generate` raises, and EngineGenerateError also if the request is aborted by its id, because then there is
        no vector to yield.
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
                lora_request,
                tokenization_kwargs,
                trace_headers,
                priority,
                reasoning_ended=reasoning_ended,
                prompt_token_ids=prompt_token_ids,
            )

        return OutputIterator(self._attach, self._abandon, start)

    @accepts_unserved("AsyncLLM.chat", CALL_ARGUMENTS)
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | int | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: dict[str, Any] | None = None,
        data_parallel_rank: int | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the completions of a conversation as `generate` does, after the chat template was applied.

        `messages` have a "role" and a "content" each, as in OpenAI's API. `chat_template` replaces the model's own.
        The prompt ends where the answer begins, without `add_generation_prompt` after the last message, and with
        `continue_final_message` inside of it. `tools` and `chat_template_kwargs` are what the template reads besides;
        calls of tools are not parsed (see `vllm_mp.client.answer_parser`). If the template knows no tools, a built-in
        prompt describes them, which asks for calls that `HermesToolParser` reads. The template writes the special
        tokens, unless `tokenization_kwargs` has add_special_tokens=True. A content may be a list of parts with images:
        {"type": "image_url", "image_url": {"url": ...}}, or {"type": "image_pil", "image_pil": image of Pillow}, for
        which `mm_processor_kwargs` are options of the model's image processor. A part with a "uuid" names its image, as
        `multi_modal_uuids` do.

        Raises ValueError for messages or a template that cannot be used, and what `generate` raises.
        """

        async def make_prompt() -> PromptType:
            messages_with_marks, images = await self.take_images(messages)
            text = await self.chat_template.render(
                messages_with_marks,
                template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                variables=chat_template_kwargs,
                has_images=bool(images),
            )
            return text_prompt(text, images, mm_processor_kwargs)

        async def start() -> OutputIterator:
            self._engine.check_process()
            check_generates(self.model_config)
            return await self.add_request(
                request_id,
                _LatePrompt(make_prompt),
                sampling_params,
                lora_request=lora_request,
                trace_headers=trace_headers,
                priority=priority,
                data_parallel_rank=data_parallel_rank,
                tokenization_kwargs={"add_special_tokens": False, **(tokenization_kwargs or {})},
            )

        return OutputIterator(self._attach, self._abandon, start)

    async def take_images(
        self, messages: Sequence[Any], fields: Sequence[str] | None = None, tenant: int = 0
    ) -> tuple[Sequence[Any], list[ChatImage]]:
        """Return `messages` with marks for `chat_template` in place of their images, and the images in order.

        Images that messages name by URL are fetched, as far as `allowed_media_domains` allows; the values of the result
        are as `multi_modal_data` takes them. `fields` names each image; by default its part of the messages does.
        Tenants take turns at fetches.
        Raises ChatMessageError, a ValueError that names the field, for an image that cannot be had.
        """
        self._engine.check_process()
        if not messages or not isinstance(messages, list | tuple):
            return messages, []
        taken, found = take_images(messages)
        if fields is not None:
            found = [image._replace(path=field) for field, image in zip(fields, found, strict=True)]
        if found:
            try:
                self._engine.images.check_count(len(found))
            except ValueError as error:
                raise ChatMessageError(str(error), found[0].path) from None
        try:
            values = await self._image_sources.load_all([image.value for image in found], tenant)
        except ImageSourceError as error:
            path = found[error.number].path
            raise ChatMessageError(f"{path}: {error}", path) from None
        return taken, [image._replace(value=value) for image, value in zip(found, values, strict=True)]

    async def add_request(
        self,
        request_id: str | int | None,
        prompt: PromptType | _LatePrompt | None,
        params: SamplingParams | PoolingParams | None = None,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        prompt_text: str | None = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
        kv_hints: Any = None,
        *,
        prompt_token_ids: list[int] | None = None,
        prompt_adapter_request: Any = None,
        tenant: int = 0,
    ) -> OutputIterator:
        """Send a request now and return its outputs: what `generate`, or with PoolingParams `encode`, would yield.

        `tenant`, from 0 to 4095, is the number of the party for which this client sends it: the waiting requests of
        tenants take turns, and each tenant has a share of the core's memory for requests. Raises what `generate`
        raises.
        """
        self._engine.check_process()
        check_unserved(
            session_id=session_id,
            kv_hints=kv_hints,
            reasoning_ended=reasoning_ended,
            reasoning_parser_kwargs=reasoning_parser_kwargs,
            prompt_adapter_request=prompt_adapter_request,
        )
        self.cores.check_rank(data_parallel_rank)
        trace_context = self._trace_context(trace_headers)
        self._inputs.check(params, priority)
        arrival_time = time.time() if arrival_time is None else checked_arrival_time(arrival_time)
        self._engine.admit_request()
        given = CallerRequest(
            request_id=uuid.uuid4().hex if request_id is None else checked_request_id(request_id),
            prompt=None if isinstance(prompt, _LatePrompt) else prompt,
            prompt_token_ids=prompt_token_ids,
            priority=priority,
            arrival_time=arrival_time,
            tokenization_kwargs=tokenization_kwargs or {},
            prompt_text=prompt_text,
            lora=None,
            tenant=checked_tenant(tenant),
        )
        self._engine.requests.reserve(given.request_id)
        try:
            try:
                lora = await self._adapters.prepare(lora_request)
                given = given._replace(lora=lora)
                if isinstance(prompt, _LatePrompt):
                    given = given._replace(prompt=await prompt.make())
                if isinstance(params, PoolingParams):
                    stream: RequestStream = await self._inputs.pooling(given, params)
                else:
                    stream = await self._inputs.generation(given, params)
            except Exception:
                self._engine.attach_admitted()  # raises the error to report if the engine was shut down meanwhile
                raise
            self._engine.attach_admitted()
            is_sent = self.cores.client_for(stream, data_parallel_rank).add(stream)
        except BaseException:
            self._engine.requests.cancel(given.request_id)
            raise
        if is_sent:
            self.stats.note_sent(stream, arrival_time, trace_context, lora.lora_name if lora else None)
            log_request(self.vllm_config.observability_config, stream)
        else:
            self.stats.note_unsent()
        return OutputIterator(self._attach, self._abandon, None, stream)

    def stream_group(self) -> StreamGroup:
        """Return an empty group of requests, which one consumer reads with less work per token than `generate`."""
        self._engine.check_process()
        return StreamGroup(self.add_request, self._attach, self._abandon)

    async def abort(self, request_id: str | int | Iterable[str | int]) -> None:
        """End these requests; unknown ids are ignored.

        Streams of text end with finish_reason "abort". Streams of vectors raise EngineGenerateError, because they have
        no finish_reason.
        """
        self._engine.attach()
        for each in [request_id] if isinstance(request_id, str | int) else list(request_id):
            self.cores.abort(checked_request_id(each))

    async def abort_request(self, request_id: str | int | Iterable[str | int]) -> None:
        """Alias of `abort`."""
        await self.abort(request_id)

    def get_num_unfinished_requests(self) -> AwaitableInt:
        """Return the number of requests whose streams have not ended; `await` is optional."""
        self._engine.check_process()
        return AwaitableInt(len(self._engine.requests))

    @property
    def output_processor(self) -> LiveRequests:
        """The live requests, which callers of vLLM ask `has_unfinished_requests()`."""
        return self._engine.requests

    async def wait_for_requests_to_drain(self, timeout: float = 300, *, drain_timeout: float | None = None) -> None:
        """Return when this client has no unfinished request and the core has released all its slots.

        Raises TimeoutError, which says how many are left, after `timeout` seconds; `drain_timeout`, vLLM's name of it,
        takes precedence.
        """
        await self._status.wait_for_requests_to_drain(timeout if drain_timeout is None else drain_timeout)

    @property
    def is_running(self) -> bool:
        return self._engine.accepts_requests and not self.is_stopped

    @property
    def is_stopped(self) -> bool:
        return self._engine.is_stopped

    @property
    def errored(self) -> bool:
        """All cores are gone for good."""
        return self.dead_error is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why all cores are gone for good; None while one is not."""
        return self.cores.dead_error

    @property
    def is_forked(self) -> bool:
        """This process was forked after the engine was made, and cannot use it."""
        return self._engine.is_forked

    async def check_health(self) -> None:
        """Return if a core is well, also while the background loop is stopped.

        Raises EngineDeadError if all cores are gone for good, and EngineError if no core answers in time: because it
        hangs, or because it died and its successor is not ready yet. Both are RuntimeErrors.
        """
        self._engine.attach()
        await self.cores.check_health(self.vllm_config.liveness_config.engine_iteration_timeout_s)

    async def ping(self, timeout: float) -> None:
        """Return once a core answers.

        Raises EngineDeadError if all cores are gone for good, and EngineError if none answers within `timeout` seconds,
        also because a step takes longer.
        """
        self._engine.attach()
        await self.cores.ping(timeout)

    async def core_status(self) -> dict[str, Any]:
        """Return the core's incarnation, pid, restarts, requests, KV blocks, heartbeat age and standby.

        `restarts` counts those by the core's parent, for a shared core that of `vllm-mp engine`. `last_death` says why
        the predecessor died; None if there was none. `num_late_graphs` counts the shapes of steps that the core will
        still capture as CUDA graphs, when it has no work or a step needs them. A core on Ray also has `node`, with what
        is reserved there.

        With several cores, numbers of requests, blocks, steps and restarts are sums, the rest is the first core's, and
        `cores` has the status of each core with its `rank` and `state`; that of a core without an answer is what
        `last_core_status` knows. Raises EngineError if no core answers.
        """
        return await self._status.core_status()

    def last_core_status(self) -> dict[str, Any]:
        """Return what is known of the core without asking it, also while it is dead or hangs.

        `state` is its state on the status page, "RECOVERING" while there is no core, or "DEAD" once it is gone for
        good, and `reason` says why. One of several cores with another model than the others is "LEFT_OUT". The values
        from the status page are missing if the page is not visible, as over TCP.
        """
        return self._status.last_core_status()

    async def read_core_load(self, timeout: float = 1.0) -> CoreReading | None:
        """Return the load of all cores together, over all their clients; None if it was never known.

        A core that does not answer within `timeout` seconds, because it is dead, hangs or computes a long step, is
        described by its status page if this process sees it, or else by its last answer. Raises no EngineError.
        """
        return await self._status.read_core_load(timeout)

    async def is_paused(self) -> bool:
        """Return whether any client has called `pause_generation` and none has called `resume_generation` since."""
        return bool((await self.core_status())["is_paused"])

    async def is_sleeping(self) -> bool:
        """Return whether any client has called `sleep`, and not everything has been woken up since."""
        return bool((await self.core_status())["is_sleeping"])

    async def is_tracing_enabled(self) -> bool:
        """Return whether spans of requests are sent to a collector."""
        self._engine.check_process()
        return self.is_tracing

    @property
    def is_tracing(self) -> bool:
        """What `is_tracing_enabled` returns."""
        return self._engine.is_tracing

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """Return what requests may ask of the model: "generate", "embed", "classify" and "score", as far as it can."""
        self._engine.check_process()
        return tuple(self.model_config.supported_tasks)

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

    async def pause_generation(
        self, mode: str = "abort", clear_cache: bool = True, *, wait_for_inflight_requests: bool | None = None
    ) -> None:
        """Stop generation until `resume_generation`; requests that arrive meanwhile are accepted and wait.

        `mode` decides about live requests: "abort" ends them with finish_reason "abort", "wait" lets them finish and
        returns after the last, "keep" freezes them until generation is resumed. `clear_cache` ensures that no key or
        value from before the pause is used after it, as a change of weights requires: the prefix cache is emptied, and
        frozen requests are recomputed. `wait_for_inflight_requests=True` is the older form of mode "wait".

        The pause holds for every client of a shared core, even after this client has left. Pausing a paused engine
        applies the new mode to the requests that do not already wait for the end of the pause; "abort" ends these too.
        Cancelling the call does not undo the pause. Raises ValueError for an unknown mode, TypeError unless
        `clear_cache` is a bool, and EngineError if the engine is resumed, or paused with "keep", while this call waits.
        """
        await self._control.pause("wait" if wait_for_inflight_requests else mode, clear_cache)

    async def resume_generation(self) -> None:
        """End a pause, whichever client began it; no-op if the engine is not paused."""
        await self._engine.ask("resume")

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Release the memory of the KV cache and of the weights until `wake_up`.

        `level` 1 keeps the weights in host memory, which on a CPU changes nothing for them; 2 drops them, and `wake_up`
        loads them again. Returns when the memory is free. Live requests end with finish_reason "abort", or with `mode`
        "keep" are held and continue after the wake-up as if nothing had happened; requests that arrive meanwhile are
        accepted and wait. The prefix cache is emptied.

        The sleep holds for every client of a shared core, even after this client has left, and beside a pause:
        generation continues only when both have ended. A core that already sleeps goes to the deeper of the two levels.
        Cancelling the call does not undo it. Raises ValueError for an unknown level or mode, and EngineError if the
        host has no room for the weights; then the engine continues.
        """
        await self._control.sleep(level, mode)

    async def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """End a sleep, whichever client began it, and return whether the engine is awake; no-op if it was.

        `tags` names what comes back: "weights", "kv_cache" or both; generation continues when both are back. Returns
        when that is done, which after level 2 takes as long as loading the model; the core answers nothing else
        meanwhile. Raises ValueError for other tags, and EngineError if there is no memory or the weights cannot be
        read: then the engine stays asleep, the memory that this call took is released, and the call may be repeated.
        """
        return await self._control.wake_up(tags)

    async def reset_prefix_cache(
        self, reset_running_requests: Any = False, reset_connector: bool = False, *, device: Any = None
    ) -> bool:
        """Empty the prefix cache, so that later requests share nothing with earlier ones; return True.

        With `reset_running_requests`, running requests are computed again from their beginning, with the same tokens.
        `reset_connector` has no effect, because the prefix cache file is always emptied too. `device` may name the
        device that holds the cache, as "cpu", "cuda" or vLLM's `Device.GPU`; older callers give it as the first
        argument. Raises ValueError for another device.
        """
        if not isinstance(reset_running_requests, bool):
            reset_running_requests, device = False, reset_running_requests
        await self._control.reset_prefix_cache(
            device, reset_running_requests=reset_running_requests, reset_connector=reset_connector
        )
        return True

    async def reset_mm_cache(self) -> None:
        """Forget the images, and their embeddings, that no live request needs; no-op if the model takes none.

        Live requests are not affected. In a core that clients share, only an operator may call this.
        """
        await self._control.reset_mm_cache()

    async def reset_encoder_cache(self) -> None:
        """Do what `reset_mm_cache` does: one cache holds images and their embeddings."""
        await self._control.reset_mm_cache()

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Run a method of every worker, named by `method`, and return their results: one for each core and rank.

        The methods are `check_health()`, `get_cache_block_size_bytes()`, `get_kv_cache_bytes(num_tokens)`,
        `get_memory_info()`, `get_model_info()`, `get_num_parameters()` and `get_supported_tasks()`. Arguments and
        results are plain data; no code travels.

        Raises TypeError for arguments that are no plain data and for a function as `method`, ValueError for a `timeout`
        that is not above 0, EngineError with the reason if the core refuses the call or the method fails, and
        TimeoutError after `timeout` seconds, by default EngineError after `engine_iteration_timeout_s`.
        """
        return await self._control.collective_rpc(method, timeout, args, kwargs)

    async def restart_core(self) -> None:
        """Replace the core by a new process, without ending a stream, and return when that serves.

        The new process imports the code as it is installed now. It loads the model beside the core, which stops between
        two steps once all is loaded; with `data_parallel_size` the cores are replaced one after another. The KV cache
        is handed over where it outlives the core (see `recover_kv_cache`). Raises EngineStartError, with the cause, if
        the new process does not start, or has another model because its files have changed: then the core goes on.
        Raises ValueError for a core that another process has started, and for an engine with `recovery=False`.
        """
        await self._control.restart_cores()

    async def start_profile(self) -> None:
        """Record the core's next steps, at most 256, with PyTorch's profiler.

        Raises EngineError if the profiler runs already.
        """
        await self._engine.ask("start_profile")

    async def stop_profile(self) -> str:
        """Stop the profiler and write its trace, which Chrome and Perfetto display; return the trace's folder.

        With several cores, the folders are separated by commas.

        The folder is on the core's machine: the value of VLLM_TORCH_PROFILER_DIR in the core's environment, or else a
        temporary folder that the caller must remove. The recording is lost if the core dies. Raises EngineError if
        `start_profile` has not been called.
        """
        return ", ".join(dict.fromkeys(await self._engine.ask("stop_profile")))

    @property
    def core_ranks(self) -> list[int]:
        """The ranks of the engine's cores."""
        return [client.rank for client in self.cores.clients]

    async def drain_core(self, rank: int, timeout: float = 300.0) -> None:
        """Send a core no new requests, and return when it has finished the requests of this client.

        The core stays drained until `resume_core`, also if this call is cancelled. If all cores are drained, requests
        go to them all the same. Raises ValueError if there is no such core, and TimeoutError, which says how many
        requests are left, after `timeout` seconds.
        """
        await self._core_changes.drain(rank, timeout)

    async def resume_core(self, rank: int) -> None:
        """Send a core requests again, after `drain_core`. Raises ValueError if there is no such core."""
        self._engine.attach()
        self.cores.resume(rank)

    async def add_core(self, address: str | None = None) -> int:
        """Use one more core and return its rank: a new process, or with `connect` the core at `address`.

        A new process loads the model while requests run. It gets the CPUs or the GPUs of a core that was removed, or
        further ones, enters the pause and the sleep that are in force, and has the same adapters, also those that are
        added or removed while it starts.

        Raises ValueError if an address is given for a new process, lacks, or is that of a core of this engine,
        EngineStartError if the core does not serve the engine's model or its adapters, and EngineError if no core
        serves now, or a pause or a sleep begins or ends meanwhile.
        """
        return await self._core_changes.add(address)

    async def remove_core(self, rank: int) -> None:
        """End a core, or leave it running if it is shared. Other cores go on at once with the requests it has.

        Call `drain_core` before to let it finish them. Raises ValueError if there is no such core, or if no other core
        is left that could go on.
        """
        await self._core_changes.remove(rank)

    def give_up_core(self, address: str, cause: str, is_from_outside: bool) -> None:
        """Wait no longer for the shared core at `address`, because its parent says that it is gone for good.

        Other cores go on with its requests. `cause` says why the core died, and `is_from_outside` that no request can
        be to blame. Raises ValueError if this engine has no core at `address`.
        """
        self._core_changes.give_up(address, cause, is_from_outside)

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter into each core's host memory, where it is known until `remove_lora`, also by a next core.

        Return True if the adapter was not listed before, or with `load_inplace`. Other requests go on meanwhile. With
        `load_inplace`, later requests with the id use what the folder holds now; earlier ones keep their weights.

        Raises EngineError if the folder cannot be used, or if the id belongs to an adapter with another name or path;
        then nothing has changed.
        """
        return await self._adapters.add(lora_request)

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter, pinned or not; return False if it is not listed.

        Requests that use it run to their ends; later ones load it again, if they may.
        """
        return await self._adapters.remove(lora_id)

    async def list_loras(self) -> set[int]:
        """Return the ids of the adapters that are added or loaded."""
        return await self._adapters.ids()

    async def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in host memory and, once a request has used it, on the device; return True.

        `remove_lora` ends that. Raises EngineError if the adapter is not listed, or if there are not enough slots
        (`max_loras`) for it and the adapters that are pinned or in use.
        """
        return await self._adapters.pin(lora_id)

    async def do_log_stats(self, scheduler_outputs: Any = None, model_output: Any = None) -> None:
        """Have all stat loggers log now, and return when they have; without a call, they do so every 10 seconds.

        The arguments are accepted for older callers and have no effect: the engine counts by itself.
        """
        self._engine.check_process()
        await self._engine.stat_loggers.log()

    def add_logger(self, logger_name: str, logger: Any) -> CompletedCall:
        """Call the stat logger `logger` from now on; `await` is optional.

        Raises KeyError if a logger has the name, and TypeError if `logger` is none.
        """
        self._engine.check_process()
        self._engine.stat_loggers.add(logger_name, logger)
        return CompletedCall()

    def remove_logger(self, logger_name: str) -> CompletedCall:
        """Call a stat logger no more; `await` is optional.

        Raises KeyError, with the names that there are, if no logger has the name.
        """
        self._engine.check_process()
        self._engine.stat_loggers.remove(logger_name)
        return CompletedCall()

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer, loaded when it is first asked for; None with skip_tokenizer_init."""
        return None if self.model_tokenizer is None else library_tokenizer(self.model_tokenizer)

    @property
    def model_tokenizer(self) -> Any:
        """The tokenizer that this client works with, which may be a `ModelTokenizer`; None with skip_tokenizer_init."""
        return None if self._engine.prompt_tokenizer is None else self._engine.prompt_tokenizer.tokenizer

    def get_tokenizer(self, lora_request: Any = None) -> Any:
        """Return the Hugging Face tokenizer; `await` on the result gives the same object.

        The first call may load it, with transformers, which takes a second.

        Adapters use the model's tokenizer, so a `lora_request` changes nothing. Raises ValueError for one without LoRA,
        and if the engine has no tokenizer.
        """
        checked_adapter(lora_request, self.vllm_config)
        return library_tokenizer(self._tokenizer.required().tokenizer)

    async def get_input_preprocessor(self) -> InputPreprocessor:
        """Return what turns a prompt into token ids as `generate` does."""
        self._engine.check_process()
        return InputPreprocessor(self.vllm_config, self._engine.prompt_tokenizer)

    @functools.cached_property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template, which is rendered beside the event loop."""
        return ChatTemplate(self.model_tokenizer, image_token=self._engine.images.image_token)

    @functools.cached_property
    def _image_sources(self) -> ImageSources:
        from vllm_mp.client.images.sources import ImageSources  # which imports modules for HTTP

        return ImageSources(self.vllm_config.multimodal_config.allowed_media_domains)

    @functools.cached_property
    def token_bytes(self) -> Callable[[int], bytes] | None:
        """What returns the bytes of a single token, which may be a part of a character; None without a tokenizer."""
        return None if self.model_tokenizer is None else token_bytes(self.model_tokenizer)

    async def tokenize(self, text: str, **options: Any) -> list[int]:
        """Return the token ids of `text`, as the tokenizer called with `options` gives them.

        Raises ValueError for text that is not valid Unicode, and if the engine has no tokenizer.
        """
        return await self._tokenizer.tokenize(text, options)

    async def prompt_tokens(self, prompt: PromptType, *, tenant: int = 0, **options: Any) -> list[int]:
        """Return the token ids that the model reads for `prompt`, those of its images included.

        `options` are those of the tokenizer; `tenant` is as for `add_request`. Raises ValueError or TypeError for a
        prompt that no request can have, however long it is, and NoRoomError if too many images wait.
        """
        self._engine.check_process()
        with self._engine.explaining_shutdown():
            return await self._inputs.prompt_tokens(prompt, options, checked_tenant(tenant))

    async def has_room(self, text: str, num_output_tokens: int, **options: Any) -> bool:
        """Return whether the context has room for `text`, tokenized with `options`, and for that many output tokens.

        A text that cannot fit, by its size, is not tokenized. Raises what `tokenize` raises.
        """
        return await self._tokenizer.has_room(text, num_output_tokens, options)

    async def detokenize(self, token_ids: list[int], **options: Any) -> str:
        """Return the text of `token_ids`, as the tokenizer's `decode` with `options` gives it.

        Raises ValueError for ids outside the vocabulary, and if the engine has no tokenizer.
        """
        return await self._tokenizer.detokenize(token_ids, options)

    def start_background_loop(self) -> CompletedCall:
        """Accept requests with `start_engine_loop=False`, or after `shutdown_background_loop`; `await` is optional.

        Raises RuntimeError if the loop runs, and EngineDeadError if the core is gone for good.
        """
        self._engine.start_background_loop()
        return CompletedCall()

    def shutdown_background_loop(self) -> CompletedCall:
        """Abort all requests, as `abort` does; idempotent. `await` is optional.

        The next request starts the loop again; with `start_engine_loop=False` requests are refused until
        `start_background_loop`. The core keeps running, and other calls still work; `shutdown` ends the core.
        """
        self._engine.shutdown_background_loop()
        return CompletedCall()

    def shutdown(self, timeout: float | None = None) -> None:
        """End the core, by force after `timeout` seconds, and remove its files; live streams fail. Idempotent.

        A shared core, as with `connect`, continues without this client's requests.
        """
        self._engine.shutdown(timeout)

    async def aclose(self, timeout: float | None = None) -> None:
        """Do what `shutdown` does, beside the event loop; a further call waits for the first.

        Cancelling the call does not undo it: the core ends all the same.
        """
        await self._engine.aclose(timeout)

    async def __aenter__(self) -> Self:
        self._engine.check_process()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        await self.aclose()

    __getattr__ = refuse_attributes(_REFUSED)

    def _attach(self) -> None:
        """Receive the outputs of requests on the running loop."""
        self._engine.attach()

    def _abandon(self, stream: RequestStream) -> None:
        """Abort the request of a stream that has lost its consumer; from any thread."""
        self.cores.abandon(stream)

    def _trace_context(self, headers: Mapping[str, str] | None) -> dict[str, str]:
        """Return the headers that continue the caller's trace. Raises TypeError unless all are str."""
        context = check_trace_headers(headers)
        if context and not self.is_tracing and not self._has_warned_of_headers:
            self._has_warned_of_headers = True
            logger.warning("trace_headers have no effect: set otlp_traces_endpoint, or leave them out")
        return context


def _import_rest() -> None:
    """Make the names of `_IMPORTED_BESIDE_CORE` global names of this module; idempotent."""
    for module_name, names in _IMPORTED_BESIDE_CORE.items():
        module = importlib.import_module(f"vllm_mp.{module_name}")
        globals().update({name: getattr(module, name) for name in names})


AsyncLLMEngine = AsyncLLM
"""The same class under its older name."""
