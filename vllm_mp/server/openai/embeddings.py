"""The endpoint /v1/embeddings: a vector for each input."""

import asyncio
import base64
from typing import Annotated, Any, Literal, cast

import msgspec
from starlette.responses import Response

from vllm_mp.client.outputs.output_iterator import OutputIterator
from vllm_mp.client.prompts.prompt import PromptType, TextPrompt, TokensPrompt
from vllm_mp.outputs import PoolingRequestOutput
from vllm_mp.requests.lora_request import LoRARequest
from vllm_mp.requests.pooling_params import PoolingParams
from vllm_mp.server.http.body import Ignored, RequestBody
from vllm_mp.server.http.endpoint import Call, post
from vllm_mp.server.http.errors import ApiError, as_refusal
from vllm_mp.server.openai.generation import PROMPTS_PER_TURN
from vllm_mp.server.openai.models import check_model
from vllm_mp.server.watching.tracing import trace_headers
from vllm_mp.wire import MAX_TENANTS

_MAX_INPUTS = 2048
"""Maximum number of inputs of a request, as OpenAI has it."""
_VECTORS_PER_TURN = 16
"""Vectors that become JSON before other tasks get a turn on the event loop."""
_POOLING_FIELDS = ("dimensions", "normalize", "pooling_type", "truncate_prompt_tokens")
"""Fields of a request that are fields of `PoolingParams`."""


class EmbeddingsBody(RequestBody):
    """A request for vectors."""

    input: Annotated[
        str | list[str | int | list[int]],
        msgspec.Meta(description=f"A text, its token ids, or a list of at most {_MAX_INPUTS} texts or lists of ids."),
    ]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    """ "base64" stands for the bytes of the vector as little-endian float32; default: "float"."""
    dimensions: int | None = None
    """Keep that many leading components."""
    normalize: bool | None = None
    """Scale the vector to length 1; default: unless the model says otherwise."""
    pooling_type: str | None = None
    """ "last", "mean" or "cls"; default: what the model says."""
    truncate_prompt_tokens: int | None = None
    """Cut longer inputs to that many tokens; -1: to the model's context."""
    add_special_tokens: bool | None = None
    """Put the tokenizer's special tokens, such as the begin of the sequence, around a text; default: true."""
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    user: Ignored = None


class Embedding(msgspec.Struct):
    """The vector of an input."""

    index: int
    """The index of the input in the request."""
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingsUsage(msgspec.Struct):
    """The tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(msgspec.Struct, kw_only=True):
    """The vectors in the order of the inputs."""

    id: str
    object: str = "list"
    model: str
    data: list[Embedding]
    usage: EmbeddingsUsage


async def create_embeddings(call: Call, body: EmbeddingsBody) -> Response:
    """Return the vectors of all inputs; an input that fails ends the request, and aborts the others."""
    model = check_model(call.server, body.model)
    given = {name: value for name in _POOLING_FIELDS if (value := getattr(body, name)) is not None}
    try:
        params = PoolingParams(**given, task="embed")
    except (ValueError, TypeError) as error:
        raise as_refusal(error, _POOLING_FIELDS) from None
    prompts = _prompts(body.input, call.tenant.cache_salt(body.cache_salt))
    request_id = f"embd-{call.request_id}"
    await call.resources.enter_async_context(call.server.admission.admit(len(prompts), call.tenant.number))
    try:
        tasks: list[asyncio.Task[PoolingRequestOutput]] = []
        async with asyncio.TaskGroup() as group:
            for index, prompt in enumerate(prompts):
                tasks.append(
                    group.create_task(_embed(call, body, prompt, params, f"{request_id}-{index}", index, model.lora))
                )
                if index % PROMPTS_PER_TURN == 0:
                    await asyncio.sleep(0)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    outputs = [task.result() for task in tasks]
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    response = EmbeddingsResponse(
        id=request_id,
        model=model.name,
        data=await _encoded(outputs, body.encoding_format == "base64"),
        usage=EmbeddingsUsage(num_tokens, num_tokens),
    )
    return Response(msgspec.json.encode(response), media_type="application/json")


def _prompts(given: str | list[Any], cache_salt: str) -> list[PromptType]:
    """Return the inputs. Raises ApiError, naming the input at fault, if there are none, too many, or empty inputs."""
    inputs: list[Any] = [given]
    if isinstance(given, list):
        if not given:
            raise ApiError(400, "input is empty; give at least one text or list of token ids", param="input")
        if type(given[0]) is not int:
            inputs = given
        elif any(type(item) is not int for item in given):
            raise ApiError(400, "input mixes token ids with other inputs; put the ids into a list", param="input")
    if len(inputs) > _MAX_INPUTS:
        raise ApiError(
            400, f"input must hold at most {_MAX_INPUTS} inputs, got {len(inputs)}; send fewer", param="input"
        )
    prompts: list[PromptType] = []
    for index, item in enumerate(inputs):
        if isinstance(item, int):
            message = f"input[{index}] is a token id beside other inputs; put token ids into a list"
            raise ApiError(400, message, param=f"input[{index}]")
        if not item:
            path = "input" if item is given else f"input[{index}]"
            raise ApiError(400, f"{path} is empty; give at least one character or token", param=path)
        if isinstance(item, str):
            prompts.append(TextPrompt(prompt=item, cache_salt=cache_salt))
        else:
            prompts.append(TokensPrompt(prompt_token_ids=item, cache_salt=cache_salt))
    return prompts


async def _embed(
    call: Call,
    body: EmbeddingsBody,
    prompt: PromptType,
    params: PoolingParams,
    request_id: str,
    index: int,
    lora: LoRARequest | None,
) -> PoolingRequestOutput:
    """Return the vector of an input. Raises ApiError, naming the input or the field at fault, if it cannot have any."""
    options = {} if body.add_special_tokens is None else {"add_special_tokens": body.add_special_tokens}
    encoding: OutputIterator | None = None
    try:
        encoding = await call.server.engine.add_request(
            request_id,
            prompt,
            params,
            lora_request=lora,
            priority=body.priority or 0,
            trace_headers=trace_headers(call),
            tokenization_kwargs=options,
            tenant=call.tenant.number % MAX_TENANTS,
        )
        return cast("PoolingRequestOutput", await anext(encoding))
    except (ValueError, TypeError, NotImplementedError) as error:
        refusal = as_refusal(error, (*_POOLING_FIELDS, "priority", "cache_salt", "request_id"))
        refusal.param = refusal.param or (f"input[{index}]" if isinstance(body.input, list) else "input")
        raise refusal from None
    finally:
        if encoding is not None:
            await encoding.aclose()


async def _encoded(outputs: list[PoolingRequestOutput], as_base64: bool) -> list[Embedding]:
    """Return the JSON of each vector."""
    encoder = msgspec.json.Encoder()
    data: list[msgspec.Raw] = []
    for index, output in enumerate(outputs):
        if index % _VECTORS_PER_TURN == _VECTORS_PER_TURN - 1:
            await asyncio.sleep(0)
        vector = output.outputs.data
        embedding = base64.b64encode(vector.astype("<f4").tobytes()).decode() if as_base64 else vector.tolist()
        data.append(msgspec.Raw(encoder.encode(Embedding(index, embedding))))
    return cast("list[Embedding]", data)


ROUTES = [post("/v1/embeddings", create_embeddings, EmbeddingsBody, EmbeddingsResponse)]
