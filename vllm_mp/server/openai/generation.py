"""The generation of text for a request: what the completions, chat and responses endpoints share."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from vllm_mp.client.engine.stream_group import Outputs, StreamGroup
from vllm_mp.client.prompts.prompt import PromptType
from vllm_mp.errors import ConstraintError
from vllm_mp.outputs import RequestFailure, RequestOutput
from vllm_mp.requests.lora_request import LoRARequest
from vllm_mp.requests.sampling_params import SamplingParams
from vllm_mp.server.http.body import Ignored, RequestBody
from vllm_mp.server.http.endpoint import Call, prompt_id, read_rank
from vllm_mp.server.http.errors import as_api_error
from vllm_mp.server.openai.output_form import output_form
from vllm_mp.server.openai.sampling_fields import SamplingFields, asks_for_no_tokens, refused_parameters
from vllm_mp.server.openai.tools import ToolUse
from vllm_mp.server.watching.tracing import trace_headers
from vllm_mp.wire import MAX_TENANTS

PROMPTS_PER_TURN = 32
"""Prompts of a request that are sent to the engine before other tasks get a turn on the event loop."""


class StreamOptions(RequestBody):
    """What a stream reports beside the text."""

    include_usage: bool | None = None
    """Send the usage in a last chunk, which has no choices."""
    continuous_usage_stats: bool | None = None
    """Send the usage so far in every chunk."""
    include_obfuscation: Ignored = None


class GenerationBody(SamplingFields, kw_only=True):
    """The fields that requests for text have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    """Put the tokenizer's special tokens, such as the begin of the sequence, around a text."""
    priority: int | None = None
    """A lower number is scheduled earlier, with `--scheduling-policy priority`."""
    cache_salt: str | None = None
    """Only prompts with the same salt share cached prefixes."""
    request_id: str | None = None
    """The id of the request, instead of the header X-Request-Id."""
    return_token_ids: bool | None = None
    """Return the token ids of prompt and completion."""
    return_tokens_as_token_ids: bool | None = None
    """Write each token of log-probabilities as its id, such as "token_id:17", which is unambiguous."""
    metadata: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None
    store: Ignored = None
    user: Ignored = None


class PromptTokensDetails(msgspec.Struct):
    """What the prompt's tokens are made of."""

    cached_tokens: int
    """Tokens that the prefix cache held."""


class CompletionTokensDetails(msgspec.Struct):
    """What the tokens of the completions are made of."""

    reasoning_tokens: int
    """Tokens of the thoughts, with their ends."""


class Usage(msgspec.Struct):
    """The tokens that a request took."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    """Present if a reasoning parser splits the answers."""


PassOn = Callable[[int, RequestOutput], bool]
"""Sends an output at once if it can; takes the index of its prompt too, and returns whether it has sent the output."""


def _take_none(index: int, output: RequestOutput) -> bool:
    return False


class Generation:
    """The live completions of an HTTP request, for each of its prompts.

    The call that it was started for aborts what is left when it ends.
    """

    def __init__(
        self,
        request_id: str,
        ids: Sequence[str],
        group: StreamGroup,
        form_field: str,
        tools: ToolUse | None,
        *,
        reads_only: bool,
    ) -> None:
        """`ids` are the ids of the requests of `group`, in the order of their prompts.

        `form_field` is the field that demands the form of the output, unless `tools` do; empty: no field does.
        `reads_only`: the request asks for no tokens; the one that the engine makes all the same is left out of every
        output.
        """
        self.request_id = request_id
        self._indices = {each: index for index, each in enumerate(ids)}
        self._group = group
        self._prompt_tokens = [0] * len(ids)
        self._cached_tokens = [0] * len(ids)
        self._completion_tokens = 0
        self._form_field = form_field
        self._tools = tools
        self._reads_only = reads_only

    async def outputs(self, pass_on: PassOn = _take_none) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yield each output that `pass_on` does not take, with the index of its prompt, as it comes.

        Raises EngineError if a request fails.
        """

        def pass_all_on(outputs: Outputs) -> Outputs:
            for position, output in enumerate(outputs):
                if isinstance(output, RequestFailure) or self._reads_only:
                    return outputs[position:]
                index = self._indices[output.request_id]
                if not pass_on(index, output):
                    return outputs[position:]
                self._count(index, output)
            return []

        while outputs := await self._group.relay(pass_all_on):
            for output in outputs:
                if isinstance(output, RequestFailure):
                    raise self._failure(output.error)
                index = self._indices[output.request_id]
                if self._reads_only:
                    _empty(output)
                self._count(index, output)
                yield index, output

    async def results(self) -> list[RequestOutput]:
        """Return the last output of each prompt, which with FINAL_ONLY holds everything."""
        results = {index: output async for index, output in self.outputs()}
        return [results[index] for index in range(len(results))]

    def usage(self) -> Usage:
        """Return the tokens so far."""
        prompt_tokens = sum(self._prompt_tokens)
        total_tokens = prompt_tokens + self._completion_tokens
        details = PromptTokensDetails(sum(self._cached_tokens))
        return Usage(prompt_tokens, self._completion_tokens, total_tokens, details)

    def _failure(self, error: Exception) -> Exception:
        """Return the error of a request as the client is told, with the field at fault."""
        if not isinstance(error, ConstraintError):
            return error
        failure = as_api_error(error)
        failure.param = self._form_field or None
        if self._tools is not None and self._tools.form is not None:
            failure.param, failure.message = self._tools.located(failure.message, self._form_field)
        return failure

    def _count(self, index: int, output: RequestOutput) -> None:
        self._prompt_tokens[index] = len(output.prompt_token_ids)
        self._cached_tokens[index] = output.num_cached_tokens or 0
        for completion in output.outputs:
            self._completion_tokens += len(completion.token_ids)


def _empty(output: RequestOutput) -> None:
    """Remove the tokens of the completions; one that has ended has reached its length."""
    for completion in output.outputs:
        completion.text, completion.token_ids, completion.stop_reason = "", [], None
        if completion.logprobs is not None:
            completion.logprobs = []
        if completion.finish_reason == "stop":
            completion.finish_reason = "length"


async def start_generation(
    call: Call,
    kind: str,
    prompts: Sequence[PromptType],
    params: SamplingParams,
    body: GenerationBody,
    *,
    field: str,
    add_special_tokens: bool,
    lora: LoRARequest | None = None,
    form_field: str | None = None,
    tools: ToolUse | None = None,
    image_paths: Sequence[str] = (),
) -> Generation:
    """Send a request to the engine for each prompt, once the server admits them.

    `kind` begins the id, as "cmpl"; the rest is the id of `call`. `field` is the field of the prompts.
    `add_special_tokens` applies if `body` does not say it. `lora` is the adapter that answers; None: the base model
    does. `form_field` is the field that demands the form of the output, unless `tools` do; None: the field of `body`
    that does. `image_paths` are the fields with the images of a single prompt. The requests are aborted when `call`
    ends. Raises ApiError, naming the field at fault, for a request that cannot run.
    """
    if body.stream_options is not None and not body.stream:
        call.ignore("stream_options", "needs stream=true; add it, or leave them out")
    request_id = f"{kind}-{call.request_id}"
    if body.add_special_tokens is not None:
        add_special_tokens = body.add_special_tokens
    rank = read_rank(call.http)
    await call.resources.enter_async_context(call.server.admission.admit(len(prompts) * params.n, call.tenant.number))
    ids = [request_id] if len(prompts) == 1 else [prompt_id(request_id, index) for index in range(len(prompts))]

    group = call.server.engine.stream_group()
    call.resources.push_async_callback(group.aclose)

    async def add(index: int) -> None:
        try:
            await group.add(
                prompts[index],
                params,
                ids[index],
                lora_request=lora,
                priority=body.priority or 0,
                trace_headers=trace_headers(call),
                data_parallel_rank=rank,
                tokenization_kwargs={"add_special_tokens": add_special_tokens},
                tenant=call.tenant.number % MAX_TENANTS,
            )
        except (ValueError, TypeError, NotImplementedError) as error:
            raise refused_parameters(error, field if len(prompts) == 1 else f"{field}[{index}]", image_paths) from None

    if len(prompts) == 1:
        await add(0)
    else:
        try:
            # These tasks end together, so that no prompt is still being tokenized when another prompt is refused.
            async with asyncio.TaskGroup() as tasks:
                for index in range(len(prompts)):
                    tasks.create_task(add(index))
                    if index % PROMPTS_PER_TURN == 0:
                        await asyncio.sleep(0)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
    if form_field is None:
        form_field = output_form(body)[1]
    return Generation(request_id, ids, group, form_field, tools, reads_only=asks_for_no_tokens(body))
