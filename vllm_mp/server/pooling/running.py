"""What the endpoints for vectors, classes and scores share: their fields, and how the engine reads their inputs."""

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import msgspec

from vllm_mp.client.outputs.output_iterator import OutputIterator
from vllm_mp.client.prompts.prompt import PromptType, TextPrompt, TokensPrompt
from vllm_mp.outputs import PoolingRequestOutput
from vllm_mp.requests.lora_request import LoRARequest
from vllm_mp.requests.pooling_params import PoolingParams
from vllm_mp.server.http.body import Ignored, RequestBody
from vllm_mp.server.http.endpoint import Call, prompt_id
from vllm_mp.server.http.errors import ApiError, as_refusal
from vllm_mp.server.openai.generation import PROMPTS_PER_TURN
from vllm_mp.server.watching.tracing import trace_headers
from vllm_mp.wire import MAX_TENANTS

MAX_INPUTS = 2048
"""Maximum number of inputs of a request, as OpenAI has it."""
_POOLING_FIELDS = ("dimensions", "normalize", "pooling_type", "truncate_prompt_tokens", "use_activation", "task")
"""Fields of a request that are fields of `PoolingParams`."""


class PoolingBody(RequestBody, kw_only=True):
    """The fields that requests for vectors, classes and scores have in common."""

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    """Cut longer inputs to that many tokens; -1: to the model's context."""
    priority: int | None = None
    """A lower number is read earlier, with `--scheduling-policy priority`."""
    cache_salt: str | None = None
    """Only inputs with the same salt share cached prefixes."""
    request_id: str | None = None
    """The id of the request, instead of the header X-Request-Id."""
    user: Ignored = None


class PoolingUsage(msgspec.Struct):
    """The tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, outputs: Sequence[PoolingRequestOutput]) -> "PoolingUsage":
        num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        return cls(num_tokens, num_tokens)


class Inputs(NamedTuple):
    """What the engine reads for a request."""

    prompts: Sequence[PromptType]
    params: Sequence[PoolingParams]
    """Those of each prompt."""
    paths: Sequence[str]
    """The path in the request of each prompt, for errors."""


def pooling_params(body: msgspec.Struct, **own: Any) -> PoolingParams:
    """Return the parameters that `body` asks for; those of `own` precede. Raises ApiError, naming the field."""
    given = {name: value for name in _POOLING_FIELDS if (value := getattr(body, name, None)) is not None}
    try:
        return PoolingParams(**{**given, **own})
    except (ValueError, TypeError) as error:
        raise as_refusal(error, _POOLING_FIELDS) from None


def read_inputs(given: str | list[Any], cache_salt: str, params: PoolingParams, field: str = "input") -> Inputs:
    """Return the inputs of a field: a text, its token ids, or a list of these.

    Raises ApiError, naming the input at fault, if there are none, too many, or empty inputs.
    """
    inputs: list[Any] = [given]
    if isinstance(given, list):
        if not given:
            raise ApiError(400, f"{field} is empty; give at least one text or list of token ids", param=field)
        if type(given[0]) is not int:
            inputs = given
        elif any(type(item) is not int for item in given):
            raise ApiError(400, f"{field} mixes token ids with other inputs; put the ids into a list", param=field)
    if len(inputs) > MAX_INPUTS:
        message = f"{field} must hold at most {MAX_INPUTS} inputs, got {len(inputs)}; send fewer"
        raise ApiError(400, message, param=field)
    prompts: list[PromptType] = []
    paths = [field] if inputs != given else [f"{field}[{index}]" for index in range(len(inputs))]
    for path, item in zip(paths, inputs, strict=True):
        if isinstance(item, int):
            message = f"{path} is a token id beside other inputs; put token ids into a list"
            raise ApiError(400, message, param=path)
        if not item:
            raise ApiError(400, f"{path} is empty; give at least one character or token", param=path)
        if isinstance(item, str):
            prompts.append(TextPrompt(prompt=item, cache_salt=cache_salt))
        else:
            prompts.append(TokensPrompt(prompt_token_ids=item, cache_salt=cache_salt))
    return Inputs(prompts, [params] * len(prompts), paths)


async def run(
    call: Call,
    body: PoolingBody,
    request_id: str,
    inputs: Inputs,
    lora: LoRARequest | None,
    add_special_tokens: bool | None = None,
) -> list[PoolingRequestOutput]:
    """Return the vectors of all inputs; an input that fails ends the request, and aborts the others.

    Raises ApiError, naming the input or the field at fault, if an input cannot have any.
    """
    await call.resources.enter_async_context(call.server.admission.admit(len(inputs.prompts), call.tenant.number))
    options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}

    async def read(index: int) -> PoolingRequestOutput:
        encoding: OutputIterator | None = None
        try:
            encoding = await call.server.engine.add_request(
                prompt_id(request_id, index),
                inputs.prompts[index],
                inputs.params[index],
                lora_request=lora,
                priority=body.priority or 0,
                trace_headers=trace_headers(call),
                tokenization_kwargs=options,
                tenant=call.tenant.number % MAX_TENANTS,
            )
            return cast("PoolingRequestOutput", await anext(encoding))
        except (ValueError, TypeError, NotImplementedError) as error:
            refusal = as_refusal(error, (*_POOLING_FIELDS, "priority", "cache_salt", "request_id"))
            refusal.param = refusal.param or inputs.paths[index]
            raise refusal from None
        finally:
            if encoding is not None:
                await encoding.aclose()

    tasks: list[asyncio.Task[PoolingRequestOutput]] = []
    try:
        async with asyncio.TaskGroup() as group:
            for index in range(len(inputs.prompts)):
                tasks.append(group.create_task(read(index)))
                if index % PROMPTS_PER_TURN == 0:
                    await asyncio.sleep(0)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
