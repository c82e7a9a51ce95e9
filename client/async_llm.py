"""The asyncio client of an engine."""

import logging
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any, Self

import msgspec

from vllm_mp.arguments.unserved_arguments import accepts_unserved, check_unserved
from vllm_mp.arguments.unserved_names import refuse_attributes
from vllm_mp.arguments.unserved_table import CALL_ARGUMENTS
from vllm_mp.client.cores.supervisor import CoreSupervisor
from vllm_mp.client.engine.adapters import EngineAdapters
from vllm_mp.client.engine.control import EngineControl
from vllm_mp.client.engine.cores import EngineCores
from vllm_mp.client.engine.input_processor import InputProcessor, check_sampling_params
from vllm_mp.client.engine.lifecycle import OpenCore
from vllm_mp.client.engine.loggers import EngineLoggers
from vllm_mp.client.engine.request_log import log_request
from vllm_mp.client.engine.start import EngineStart
from vllm_mp.client.engine.status import EngineStatus
from vllm_mp.client.engine.stream_group import StreamGroup
from vllm_mp.client.engine.tokenizer import EngineTokenizer
from vllm_mp.client.engine_client import EngineClient
from vllm_mp.client.outputs.output_iterator import OutputIterator
from vllm_mp.client.outputs.stream import RequestStream
from vllm_mp.client.prompts.prompt import PromptType
from vllm_mp.client.prompts.prompt_tokenizer import PromptTokenizer
from vllm_mp.client.prompts.request import CallerRequest, checked_request_id, checked_tenant
from vllm_mp.client.stats.tracing import RequestTracer, check_trace_headers
from vllm_mp.outputs import PoolingRequestOutput, RequestOutput
from vllm_mp.requests.lora_request import LoRARequest
from vllm_mp.requests.pooling_params import PoolingParams
from vllm_mp.requests.sampling_params import SamplingParams
from vllm_mp.validation.request_validation import check_generates, checked_arrival_time

logger = logging.getLogger(__name__)

_NO_LOOP = "the core is another process with a loop of its own; start_background_loop() begins to take requests"
_NAMES_OF_V0 = {
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
}
"""Names that older versions of vLLM's class have, and what to use in their place."""


class AsyncLLM(
    EngineStart, EngineStatus, EngineControl, EngineCores, EngineLoggers, EngineAdapters, EngineTokenizer, EngineClient
):
    """An engine: this asyncio half, and the core processes, each of which runs the whole model.

    Create it with `from_engine_args`, or attach to a running core with `connect`. It may be created before any event
    loop runs. Requests belong to the loop in which they are made; only one loop at a time may use the engine.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Raise NotImplementedError for the arguments of vLLM's constructor, which needs no core that runs."""
        if wrong := {"vllm_config", "executor_class", "engine_args"} & kwargs.keys():
            raise NotImplementedError(
                f"AsyncLLM({min(wrong)}=...) is not served: an engine needs a core that runs; call "
                "AsyncLLM.from_engine_args(args) or AsyncLLM.from_vllm_config(config)"
            )
        return super().__new__(cls)

    def __init__(
        self,
        supervisors: list[CoreSupervisor],
        prompt_tokenizer: PromptTokenizer | None,
        tracer: RequestTracer | None = None,
        open_core: OpenCore | None = None,
    ) -> None:
        super().__init__(supervisors, prompt_tokenizer, tracer, open_core)
        self._inputs = InputProcessor(self.vllm_config, prompt_tokenizer)
        self._has_warned_of_headers = False

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

        `arrival_time`, in seconds of `time.time()`, is by default the time of this call. Requests of this client that
        wait with the same priority run in its order; it has no effect on other clients.

        `data_parallel_rank` names the core that gets the request, by default the one where it waits least. While that
        core does not serve, or is drained, another one gets it, because a lost stream is worse than a strange place.

        Raises ValueError or TypeError for a request that cannot run, DuplicateRequestIdError if a live request has the
        id, NotImplementedError for a feature that is not served, EngineGenerateError if this request fails,
        NotOperatorError if only an operator may have its adapter loaded, and EngineDeadError if the core is gone for
        good or the background loop is stopped.
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

        return OutputIterator(self._abandon, start)

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

        return OutputIterator(self._abandon, start)

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
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the completions of a conversation as `generate` does, after the chat template was applied.

        `messages` have a "role" and a "content" each, as in OpenAI's API. `chat_template` replaces the model's own.
        The prompt ends where the answer begins, without `add_generation_prompt` after the last message, and with
        `continue_final_message` inside of it. `tools` and `chat_template_kwargs` are what the template reads besides;
        calls of tools are not parsed (see `vllm_mp.client.answer_parser`). The template writes the special tokens,
        unless `tokenization_kwargs` has add_special_tokens=True.

        Raises ValueError for messages or a template that cannot be used, and what `generate` raises.
        """

        async def start() -> OutputIterator:
            self._check_process()
            check_generates(self.model_config)
            text = await self.chat_template.render(
                messages,
                template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                variables=chat_template_kwargs,
            )
            return await self.add_request(
                request_id,
                text,
                sampling_params,
                lora_request=lora_request,
                trace_headers=trace_headers,
                priority=priority,
                data_parallel_rank=data_parallel_rank,
                tokenization_kwargs={"add_special_tokens": False, **(tokenization_kwargs or {})},
            )

        return OutputIterator(self._abandon, start)

    async def add_request(
        self,
        request_id: str | int | None,
        prompt: PromptType | None,
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
        self._check_process()
        check_unserved(
            session_id=session_id,
            kv_hints=kv_hints,
            reasoning_ended=reasoning_ended,
            reasoning_parser_kwargs=reasoning_parser_kwargs,
            prompt_adapter_request=prompt_adapter_request,
        )
        self._cores.check_rank(data_parallel_rank)
        trace_context = self._trace_context(trace_headers)
        self._inputs.check(params, priority)
        arrival_time = time.time() if arrival_time is None else checked_arrival_time(arrival_time)
        self._attach_to_loop()
        lora = await self._prepare(lora_request)
        given = CallerRequest(
            request_id=uuid.uuid4().hex if request_id is None else checked_request_id(request_id),
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            priority=priority,
            arrival_time=arrival_time,
            tokenization_kwargs=tokenization_kwargs or {},
            prompt_text=prompt_text,
            lora=lora,
            tenant=checked_tenant(tenant),
        )
        self._requests.reserve(given.request_id)
        try:
            try:
                if isinstance(params, PoolingParams):
                    stream: RequestStream = await self._inputs.pooling(given, params)
                else:
                    stream = await self._inputs.generation(given, params)
            except Exception:
                self._attach_to_loop()  # raises the error to report if the engine was shut down meanwhile
                raise
            self._attach_to_loop()
            is_sent = self._cores.client_for(stream, data_parallel_rank).add(stream)
        except BaseException:
            self._requests.cancel(given.request_id)
            raise
        if is_sent:
            self.stats.note_sent(stream, arrival_time, trace_context, lora.lora_name if lora else None)
            log_request(self.vllm_config.observability_config, stream)
        else:
            self.stats.note_unsent()
        return OutputIterator(self._abandon, None, stream)

    def stream_group(self) -> StreamGroup:
        """Return an empty group of requests, which one consumer reads with less work per token than `generate`."""
        self._check_process()
        return StreamGroup(self.add_request, self._abandon)

    async def abort(self, request_id: str | int | Iterable[str | int]) -> None:
        """End these requests; unknown ids are ignored.

        Streams of text end with finish_reason "abort". Streams of vectors raise EngineGenerateError, because they have
        no finish_reason.
        """
        self._attach()
        for each in [request_id] if isinstance(request_id, str | int) else list(request_id):
            self._cores.abort(checked_request_id(each))

    __getattr__ = refuse_attributes(_NAMES_OF_V0)

    async def abort_request(self, request_id: str | int | Iterable[str | int]) -> None:
        """Do what `abort` does, of which this is another name."""
        await self.abort(request_id)

    def _abandon(self, stream: RequestStream) -> None:
        """Abort the request of a stream that has lost its consumer; from any thread."""
        self._cores.abandon(stream)

    def _trace_context(self, headers: Mapping[str, str] | None) -> dict[str, str]:
        """Return the headers that continue the caller's trace. Raises TypeError unless all are str."""
        context = check_trace_headers(headers)
        if context and not self.is_tracing and not self._has_warned_of_headers:
            self._has_warned_of_headers = True
            logger.warning("trace_headers have no effect: set otlp_traces_endpoint, or leave them out")
        return context


AsyncLLMEngine = AsyncLLM
"""The same class under its older name."""
