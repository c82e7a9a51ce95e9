"""The endpoint /v1/completions: the completions of one or several prompts."""

import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.responses import Response

from vllm_mp.client.prompt import PromptType, TextPrompt, TokensPrompt
from vllm_mp.outputs import CompletionOutput
from vllm_mp.server.body import Ignored, Refused, RequestBody
from vllm_mp.server.endpoint import Call, post
from vllm_mp.server.errors import ApiError
from vllm_mp.server.event_stream import EventStream, event
from vllm_mp.server.generation import Generation, Usage, start_generation
from vllm_mp.server.models import check_model
from vllm_mp.server.sampling_fields import SamplingFields, sampling_params

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's default of `max_tokens`."""


class StreamOptions(RequestBody):
    """What a stream reports beside the text."""

    include_usage: bool = False
    """Send the usage in a last chunk without choices."""
    continuous_usage_stats: bool = False
    """Send the usage so far in every chunk."""
    include_obfuscation: Ignored = None


class CompletionBody(SamplingFields):
    """A request for completions."""

    prompt: str | list[str | int | list[int]]
    """Text, token ids, or a list of either."""
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    """Repeat the prompt before the completion."""
    add_special_tokens: bool | None = None
    """Put the tokenizer's special tokens, such as the begin of the sequence, around a text; default: true."""
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    suffix: Refused = None
    user: Ignored = None


class CompletionChoice(msgspec.Struct):
    """One completion, or with a stream its next part."""

    index: int
    text: str
    logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class CompletionResponse(msgspec.Struct, kw_only=True):
    """The completions, or with a stream their next parts."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


async def create_completion(call: Call, body: CompletionBody) -> Response | EventStream:
    """Complete each prompt."""
    model = check_model(call.server, body.model)
    config = call.server.engine.model_config
    params = sampling_params(body, {"max_tokens": _DEFAULT_MAX_TOKENS, **config.default_sampling_params})
    generation = await start_generation(
        call, "cmpl", _prompts(body), params, request_id=body.request_id, priority=body.priority
    )
    head = CompletionResponse(id=generation.request_id, created=int(time.time()), model=model, choices=[])
    if body.stream:
        return EventStream(_chunks(generation, head, params.n, body.stream_options or StreamOptions()))
    results = await generation.results()
    head.choices = [
        _choice(index * params.n + output.index, output)
        for index, result in enumerate(results)
        for output in result.outputs
    ]
    head.usage = generation.usage()
    return Response(msgspec.json.encode(head), media_type="application/json")


def _prompts(body: CompletionBody) -> list[PromptType]:
    """Return the prompts. Raises ApiError if there is none, or if the list mixes kinds."""
    given = body.prompt
    prompts: list[Any]
    if isinstance(given, str):
        prompts = [given]
    elif not given:
        raise ApiError(400, "prompt is empty; give at least one token or text", param="prompt")
    elif all(isinstance(item, int) for item in given):
        prompts = [given]
    elif not any(isinstance(item, int) for item in given):
        prompts = list(given)
    else:
        raise ApiError(400, "prompt mixes token ids with other prompts; put the ids into a list", param="prompt")
    salt = body.cache_salt or ""
    return [
        TextPrompt(prompt=prompt, cache_salt=salt)
        if isinstance(prompt, str)
        else TokensPrompt(prompt_token_ids=prompt, cache_salt=salt)
        for prompt in prompts
    ]


async def _chunks(
    generation: Generation, head: CompletionResponse, n: int, options: StreamOptions
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream."""
    async for index, output in generation.outputs():
        for completion in output.outputs:
            head.choices = [_choice(index * n + completion.index, completion)]
            yield event(msgspec.json.encode(head))
    if options.include_usage:
        head.choices, head.usage = [], generation.usage()
        yield event(msgspec.json.encode(head))


def _choice(index: int, output: CompletionOutput) -> CompletionChoice:
    return CompletionChoice(index, output.text, None, output.finish_reason, output.stop_reason)


ROUTES = [post("/v1/completions", create_completion, CompletionBody, CompletionResponse)]
