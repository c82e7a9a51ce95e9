"""The blocking client of an engine, for scripts and notebooks."""

import types
from collections.abc import Iterable, Sequence
from typing import Any, Self

from vllm_mp.arguments.unserved_arguments import accepts_unserved, check_unserved
from vllm_mp.arguments.unserved_names import NO_RENDERER, WEIGHT_CALLS, refuse_attributes
from vllm_mp.arguments.unserved_table import CALL_ARGUMENTS
from vllm_mp.client.async_llm import AsyncLLM
from vllm_mp.client.blocking.batch_inputs import Message, conversations_of, prompts_of, with_processor_kwargs
from vllm_mp.client.blocking.batch_runner import BatchRunner
from vllm_mp.client.blocking.llm_engine import LLMEngine
from vllm_mp.client.blocking.progress_bar import UseTqdm
from vllm_mp.client.blocking.prompt_batch import BatchRequest
from vllm_mp.client.blocking.scores import class_output, pair_prompts, score_output, similarity, with_task
from vllm_mp.client.engine.tokenization_options import with_truncation
from vllm_mp.client.prompts.prompt import PromptType
from vllm_mp.client.threads.loop_thread import LoopThread
from vllm_mp.config.engine_args import AsyncEngineArgs, EngineArgs
from vllm_mp.model_store import DEFAULT_MODEL
from vllm_mp.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RequestFailure,
    RequestOutput,
    ScoringRequestOutput,
)
from vllm_mp.requests.image_options import check_processor_options
from vllm_mp.requests.lora_request import LoRARequest
from vllm_mp.requests.pooling_params import PoolingParams
from vllm_mp.requests.sampling_params import RequestOutputKind, SamplingParams

_RUNNERS = ("auto", "generate", "pooling")
_CONVERSIONS = ("auto", "none", "embed")
_REFUSED = {
    "beam_search": "generate with n completions and logprobs, and choose by cumulative_logprob",
    "apply_model": "no code travels to the core; collective_rpc calls its methods by name",
    "enqueue_chat": "chat() runs conversations; enqueue() takes prompts",
    "reward": "models with reward heads are not served; classify() and score() are",
    "renderer": NO_RENDERER,
    "get_metrics": "stat_loggers of AsyncLLM and /metrics of `vllm-mp serve` have the figures",
    "set_tokenizer": "give the option tokenizer",
    "release_kv_cache_memory": "sleep() releases the KV cache",
    **WEIGHT_CALLS,
}
"""Names of vLLM's class that this class lacks, and what to use instead."""


class LLM:
    """An engine for scripts: each call blocks until all its prompts are answered.

        with LLM("smollm2-135m-instruct") as llm:
            for output in llm.generate(["Once upon a time", "The sea is"], SamplingParams(max_tokens=32)):
                print(output.outputs[0].text)

    It runs an `AsyncLLM` in a thread, so it works in a script, in a notebook and in the thread of a running event loop,
    which it blocks. Several threads may use it, and a process may have several.

    Prompts may come from any iterable. They are taken while fewer than twice `max_num_seqs` completions are live, so
    the engine needs memory for these, however many prompts there are. Outputs are in the order of the prompts. A prompt
    that fails has a `RequestFailure` with the `error`, which reading its `outputs` raises; the others are
    not affected. If the core is gone for good, `BatchDeadError` has the outputs so far. Ctrl-C aborts all requests.

    The arguments that methods share: `prompts` is a prompt (str, token ids, dict) or an iterable of prompts. The
    parameters, `lora_request` and `priority` are the same for all prompts, or lists with an entry for each. `use_tqdm`
    shows a progress bar if stderr is a terminal; a callable, such as `functools.partial(tqdm, leave=False)`, makes one
    in any case. `tokenization_kwargs` go to the tokenizer, except `truncate_prompt_tokens`, which overrides the field
    of the parameters, and `truncation_side`, "left" or "right": the end from which tokens are taken away. Lists of
    different lengths, parameters of a wrong type and unknown `tokenization_kwargs` raise ValueError or TypeError before
    anything runs.
    """

    def __init__(
        self, model: str = DEFAULT_MODEL, *, runner: str = "auto", convert: str = "auto", **options: Any
    ) -> None:
        """Start a core of `model`; `options` are fields of `AsyncEngineArgs`. Raises what `from_engine_args` raises.

        vLLM's `runner` and `convert` are accepted where they ask for what every model does: it generates, unless it is
        an encoder, and it embeds.
        """
        for name, value, allowed in (("runner", runner, _RUNNERS), ("convert", convert, _CONVERSIONS)):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
        self._start(AsyncEngineArgs(**{"model": model, "disable_log_stats": True, **options}))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Start a core with these options.

        Raises ValueError for options that cannot work and EngineStartError, with the cause, if the core does not start.
        """
        llm = cls.__new__(cls)
        llm._start(engine_args)
        return llm

    def _start(self, engine_args: EngineArgs) -> None:
        self.async_llm = AsyncLLM.from_engine_args(engine_args)
        self.thread = LoopThread()
        self.vllm_config = self.async_llm.vllm_config
        self.model_config = self.vllm_config.model_config
        self._batches = BatchRunner(self.vllm_config, self.thread)
        self._enqueued: list[BatchRequest[RequestOutput]] = []

    @accepts_unserved("LLM.generate", CALL_ARGUMENTS)
    def generate(
        self,
        prompts: PromptType | Iterable[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput | RequestFailure]:
        """Return the completions of each prompt.

        Without `sampling_params`, the model's generation_config.json applies. `mm_processor_kwargs` are options of the
        model's image processor for prompts with images that have none of their own. Raises BatchDeadError if the core
        is gone for good.
        """
        prompts = with_processor_kwargs(prompts_of(prompts), mm_processor_kwargs)
        inputs = self._batches.inputs(prompts, self._sampling(sampling_params), lora_request, priority)
        requests = self._batches.requests(self.async_llm.generate, inputs, tokenization_kwargs=tokenization_kwargs)
        return self._batches.run(requests, inputs.total, use_tqdm)

    @accepts_unserved("LLM.chat", CALL_ARGUMENTS)
    def chat(
        self,
        messages: Iterable[Message] | Iterable[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput | RequestFailure]:
        """Return the completions of each conversation.

        `messages` is a conversation (a list of messages) or an iterable of conversations. `AsyncLLM.chat` explains the
        arguments that concern the chat template. Raises BatchDeadError if the core is gone for good.
        """
        _check_content_format(chat_template_content_format)
        inputs = self._batches.inputs(
            conversations_of(messages), self._sampling(sampling_params), lora_request, priority
        )
        requests = self._batches.requests(
            self.async_llm.chat,
            inputs,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=check_processor_options("mm_processor_kwargs", mm_processor_kwargs),
        )
        return self._batches.run(requests, inputs.total, use_tqdm)

    @accepts_unserved("LLM.enqueue", CALL_ARGUMENTS)
    def enqueue(
        self,
        prompts: PromptType | Iterable[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: UseTqdm = True,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[str]:
        """Keep the requests of `generate` for `wait_for_completion`, and return their ids.

        Nothing runs yet, so there is no bar: `use_tqdm` has no effect.
        """
        prompts = with_processor_kwargs(prompts_of(prompts), mm_processor_kwargs)
        inputs = self._batches.inputs(prompts, self._sampling(sampling_params), lora_request, priority)
        requests = list(
            self._batches.requests(self.async_llm.generate, inputs, tokenization_kwargs=tokenization_kwargs)
        )
        self._enqueued += [
            request._replace(prompt_index=len(self._enqueued) + request.prompt_index) for request in requests
        ]
        return [request.request_id for request in sorted(requests)]

    def wait_for_completion(
        self, output_type: Any = None, *, use_tqdm: UseTqdm = True
    ) -> list[RequestOutput | RequestFailure]:
        """Run the requests that `enqueue` has kept, and return their outputs in the order of the calls.

        `output_type` must be None or RequestOutput. Raises BatchDeadError if the core is gone for good.
        """
        if output_type not in (None, RequestOutput):
            raise TypeError(f"output_type must be RequestOutput, got {output_type!r}: only these are enqueued")
        requests, self._enqueued = self._enqueued, []
        return self._batches.run(requests, len(requests), use_tqdm)

    @accepts_unserved("LLM.encode", CALL_ARGUMENTS)
    def encode(
        self,
        prompts: PromptType | Iterable[PromptType],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        pooling_task: str | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput | RequestFailure]:
        """Return a vector for each prompt: its embedding, or with a classification model its classes.

        `pooling_task` is "embed" or "classify" and overrides this. Raises BatchDeadError if the core is gone for good.
        """
        params = with_task(pooling_params, pooling_task)
        tokenization_kwargs = with_truncation(tokenization_kwargs, truncate_prompt_tokens)
        inputs = self._batches.inputs(prompts_of(prompts), params, lora_request, None)
        requests = self._batches.requests(self.async_llm.encode, inputs, tokenization_kwargs=tokenization_kwargs)
        return self._batches.run(requests, inputs.total, use_tqdm)

    @accepts_unserved("LLM.embed", CALL_ARGUMENTS)
    def embed(
        self,
        prompts: PromptType | Iterable[PromptType],
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingRequestOutput | RequestFailure]:
        """Return the embedding of each prompt."""
        return self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task="embed",
            tokenization_kwargs=tokenization_kwargs,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )

    @accepts_unserved("LLM.classify", CALL_ARGUMENTS)
    def classify(
        self,
        prompts: PromptType | Iterable[PromptType],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ClassificationRequestOutput | RequestFailure]:
        """Return the probability of each class for each prompt. Raises ValueError if the model has no classes."""
        if not self.model_config.architecture.num_classes:
            raise ValueError(f"{self.model_config.model} has no classes; use a model for sequence classification")
        outputs = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task="classify",
            tokenization_kwargs=tokenization_kwargs,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        return [output if isinstance(output, RequestFailure) else class_output(output) for output in outputs]

    @accepts_unserved("LLM.score", CALL_ARGUMENTS)
    def score(
        self,
        data_1: PromptType | Sequence[PromptType],
        data_2: PromptType | Sequence[PromptType],
        /,
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        chat_template: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoringRequestOutput | RequestFailure]:
        """Return the score of each pair of a text of `data_1` and the text of `data_2` with the same index.

        A single text of `data_1` belongs to all pairs. A cross-encoder, a model with a single class, reads both texts
        of a pair at once, as str. With other models the score is the cosine similarity of the embeddings.
        `lora_request` is one adapter for all. Raises ValueError for lists of different lengths, and for a model with
        several classes.
        """
        check_unserved(chat_template=chat_template)
        tokenization_kwargs = with_truncation(tokenization_kwargs, truncate_prompt_tokens)
        left, right = list(prompts_of(data_1)), list(prompts_of(data_2))
        if len(left) not in (1, len(right)):
            raise ValueError(f"data_1 must have 1 text or as many as data_2, {len(right)}, got {len(left)}")
        num_classes = self.model_config.architecture.num_classes
        if num_classes > 1:
            raise ValueError(f"{self.model_config.model} has {num_classes} classes, not a score; call classify()")
        if num_classes:
            pairs = zip(left * (len(right) if len(left) == 1 else 1), right, strict=True)
            params = with_task(pooling_params, "classify")
            prompts, params_of_pairs = pair_prompts(
                list(pairs), params, self.get_tokenizer(), self.model_config, tokenization_kwargs
            )
            scored = self.encode(prompts, params_of_pairs, use_tqdm=use_tqdm, lora_request=lora_request)
            return [output if isinstance(output, RequestFailure) else score_output(output) for output in scored]
        outputs = self.embed(
            left + right,
            use_tqdm=use_tqdm,
            pooling_params=pooling_params,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
        )
        queries, texts = outputs[: len(left)], outputs[len(left) :]
        if len(queries) == 1:
            queries *= len(texts)
        return [similarity(query, text) for query, text in zip(queries, texts, strict=True)]

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """What requests may ask of the model: "generate", "embed", "classify" and "score", as far as it can."""
        return tuple(self.model_config.supported_tasks)

    @property
    def llm_engine(self) -> LLMEngine:
        """The attributes of vLLM's inner engine that programs read: `vllm_config`, `model_config` and the tokenizer."""
        return LLMEngine(self.async_llm)

    def get_tokenizer(self) -> Any:
        """Return the Hugging Face tokenizer. Raises ValueError if the engine has none."""
        return self.async_llm.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of requests that give none."""
        return SamplingParams(**self.model_config.default_sampling_params)

    def get_world_size(self, include_dp: bool = True) -> int:
        """Return the number of devices that compute the model; `include_dp` counts the devices of replicas too."""
        parallel = self.vllm_config.parallel_config
        return parallel.world_size * (parallel.data_parallel_size if include_dp else 1)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Empty the prefix cache as `AsyncLLM.reset_prefix_cache` does, and return True."""
        self.thread.run(
            self.async_llm.reset_prefix_cache(
                reset_running_requests=reset_running_requests, reset_connector=reset_connector
            )
        )
        return True

    def reset_mm_cache(self) -> None:
        """Forget the images, and their embeddings, that no live request needs; no-op if the model takes none."""
        self.thread.run(self.async_llm.reset_mm_cache())

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Run a method of every worker by its name, as `AsyncLLM.collective_rpc` does."""
        return self.thread.run(self.async_llm.collective_rpc(method, timeout, args, kwargs))

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Release the memory of the KV cache and of the weights until `wake_up`, as `AsyncLLM.sleep` does."""
        self.thread.run(self.async_llm.sleep(level, mode))

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """End a sleep, as `AsyncLLM.wake_up` does; return whether everything is awake."""
        self.thread.run(self.async_llm.wake_up(tags))
        return not self.thread.run(self.async_llm.is_sleeping())

    def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Record the core's next steps, as `AsyncLLM.start_profile` does.

        Raises NotImplementedError for the arguments.
        """
        check_unserved(profile_prefix=profile_prefix, delay_iterations=delay_iterations, max_iterations=max_iterations)
        self.thread.run(self.async_llm.start_profile())

    def stop_profile(self) -> str:
        """Write the trace of the profiler, as `AsyncLLM.stop_profile` does, and return its folder."""
        return self.thread.run(self.async_llm.stop_profile())

    def shutdown(self, timeout: float | None = None) -> None:
        """End the core, by force after `timeout` seconds, and the thread; calls that wait fail. Idempotent."""
        self.async_llm.shutdown(timeout)
        self.thread.close()

    def __enter__(self) -> Self:
        self.thread.check()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(model={self.model_config.model!r})"

    __getattr__ = refuse_attributes(_REFUSED)

    def _sampling(self, params: Any) -> Any:
        """Return `params`, or each of a list, with one output at the end.

        Raises TypeError for other types, and what their constructor raises if fields were changed since.
        """
        if isinstance(params, Sequence):
            return [self._sampling(each) for each in params]
        if params is None:
            params = self.get_default_sampling_params()
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams or a list of them, got {type(params).__name__}")
        final = params.clone()
        final.output_kind = RequestOutputKind.FINAL_ONLY
        return final


def _check_content_format(value: str) -> None:
    if value not in ("auto", "string"):
        raise NotImplementedError(
            f"chat_template_content_format must be 'auto' or 'string', got {value!r}: the template itself shows "
            "whether it reads lists of parts; leave it 'auto'"
        )
