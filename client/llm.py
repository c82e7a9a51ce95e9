"""The blocking client of an engine, for scripts and notebooks."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from vllm_mp.arguments.unserved_arguments import accepts_unserved, check_unserved
from vllm_mp.arguments.unserved_table import CALL_ARGUMENTS
from vllm_mp.client.blocking.batch_inputs import Message, conversations_of, prompts_of
from vllm_mp.client.blocking.llm_pooling import PoolingCalls
from vllm_mp.client.blocking.progress_bar import UseTqdm
from vllm_mp.client.blocking.prompt_batch import BatchRequest
from vllm_mp.client.prompts.prompt import PromptType
from vllm_mp.config.engine_args import EngineArgs
from vllm_mp.outputs import RequestFailure, RequestOutput
from vllm_mp.requests.lora_request import LoRARequest
from vllm_mp.requests.sampling_params import RequestOutputKind, SamplingParams


class LLM(PoolingCalls):
    """An engine for scripts: each call blocks until all its prompts are answered.

        with LLM("smollm2-135m-instruct") as llm:
            for output in llm.generate(["Once upon a time", "The sea is"], SamplingParams(max_tokens=32)):
                print(output.outputs[0].text)

    It runs an `AsyncLLM` in a thread, so it works in a script, in a notebook and in the thread of a running event loop,
    which it blocks. Several threads may use it, and a process may have several.

    Prompts may come from any iterable. They are taken while fewer than twice `max_num_seqs` completions are live, so
    the engine needs memory for these, however many prompts there are. Outputs are in the order of the prompts. A prompt
    that fails has a `RequestFailure` in its place, with the `error`, which reading its `outputs` raises; the others are
    not affected. If the core is gone for good, `BatchDeadError` has the outputs so far. Ctrl-C aborts all requests.

    The arguments that methods share: `prompts` is a prompt (str, token ids, dict) or an iterable of prompts. The
    parameters, `lora_request` and `priority` are the same for all prompts, or lists with an entry for each. `use_tqdm`
    shows a progress bar if stderr is a terminal; a callable, such as `functools.partial(tqdm, leave=False)`, makes one
    in any case. `tokenization_kwargs` go to the tokenizer. Lists of different lengths and parameters of a wrong type
    raise ValueError or TypeError before anything runs.
    """

    _enqueued: list[BatchRequest[RequestOutput]]
    """What `wait_for_completion` runs."""

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

        Without `sampling_params`, the model's generation_config.json applies. Raises BatchDeadError if the core is gone
        for good.
        """
        check_unserved(mm_processor_kwargs=mm_processor_kwargs)
        inputs = self._inputs(prompts_of(prompts), self._sampling(sampling_params), lora_request, priority)
        requests = self._requests(self._engine.generate, inputs, tokenization_kwargs=tokenization_kwargs)
        return self._run(requests, inputs.total, use_tqdm)

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
        check_unserved(mm_processor_kwargs=mm_processor_kwargs)
        _check_content_format(chat_template_content_format)
        inputs = self._inputs(conversations_of(messages), self._sampling(sampling_params), lora_request, priority)
        requests = self._requests(
            self._engine.chat,
            inputs,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            tokenization_kwargs=tokenization_kwargs,
        )
        return self._run(requests, inputs.total, use_tqdm)

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
        check_unserved(mm_processor_kwargs=mm_processor_kwargs)
        inputs = self._inputs(prompts_of(prompts), self._sampling(sampling_params), lora_request, priority)
        requests = list(self._requests(self._engine.generate, inputs, tokenization_kwargs=tokenization_kwargs))
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
        return self._run(requests, len(requests), use_tqdm)

    def _start(self, engine_args: EngineArgs) -> None:
        super()._start(engine_args)
        self._enqueued = []

    def _sampling(self, params: Any) -> Any:
        """Return `params`, or each of a list, with one output at the end. Raises TypeError for other types."""
        if isinstance(params, Sequence):
            return [self._sampling(each) for each in params]
        if params is None:
            params = self.get_default_sampling_params()
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams or a list of them, got {type(params).__name__}")
        final = copy.copy(params)  # which is not validated a second time
        final.output_kind = RequestOutputKind.FINAL_ONLY
        return final


def _check_content_format(value: str) -> None:
    if value not in ("auto", "string"):
        raise NotImplementedError(
            f"chat_template_content_format must be 'auto' or 'string', got {value!r}: templates get the text of a "
            "message, because images are not served"
        )
