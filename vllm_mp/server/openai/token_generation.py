"""The endpoint /inference/v1/generate: tokens in, tokens out."""

import functools
from collections.abc import AsyncGenerator

import msgspec
from starlette.responses import Response

from vllm_mp.client.async_llm import AsyncLLM
from vllm_mp.client.prompts.prompt import TokensPrompt
from vllm_mp.outputs import CompletionOutput, RequestOutput
from vllm_mp.requests.sampling_params import SamplingParams
from vllm_mp.server.http.body import RequestBody
from vllm_mp.server.http.endpoint import Call, json_response, post
from vllm_mp.server.http.event_stream import EventStream, encode_event
from vllm_mp.server.openai.generation import GenerationBody, StreamOptions, Usage, start_generation
from vllm_mp.server.openai.logprobs import ChatLogprobs, PromptLogprobs, chat_logprobs, convert, prompt_logprobs
from vllm_mp.server.openai.models import check_model
from vllm_mp.server.openai.sampling_fields import SamplingFields, sampling_params


class GenerateBody(RequestBody, kw_only=True):
    """A request for tokens after others."""

    token_ids: list[int]
    sampling_params: SamplingFields
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    """Only prompts with the same salt share cached prefixes."""
    priority: int | None = None
    """A lower number is scheduled earlier, with `--scheduling-policy priority`."""
    request_id: str | None = None
    """The id of the request, instead of the header X-Request-Id."""


class GeneratedChoice(msgspec.Struct, kw_only=True):
    """The tokens of one completion, or in a stream the next of them."""

    index: int
    token_ids: list[int]
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class GenerateResponse(msgspec.Struct, kw_only=True):
    """The tokens after the given ones."""

    request_id: str
    choices: list[GeneratedChoice]
    prompt_logprobs: PromptLogprobs | None = None
    usage: Usage | None = None


async def generate_tokens(call: Call, body: GenerateBody) -> Response | EventStream:
    """Return the tokens that follow the given ones."""
    engine = call.server.engine
    model = check_model(call.server, body.model, generates=True)
    common = GenerationBody(stream=body.stream, stream_options=body.stream_options, priority=body.priority)
    for name in SamplingFields.__struct_fields__:
        setattr(common, name, getattr(body.sampling_params, name))
    params = sampling_params(common, engine.model_config.default_sampling_params)
    prompt = TokensPrompt(prompt_token_ids=body.token_ids, cache_salt=call.tenant.cache_salt(body.cache_salt))
    generation = await start_generation(
        call, "gen", [prompt], params, common, field="token_ids", add_special_tokens=False, lora=model.lora
    )
    # The engine has the prompt now. The completions may take long, and their stream keeps the body.
    body.token_ids = []
    del prompt

    async def response(output: RequestOutput) -> GenerateResponse:
        choices = [await _choice(completion, params, engine) for completion in output.outputs]
        found = GenerateResponse(request_id=call.request_id, choices=choices)
        if output.prompt_logprobs is not None:
            make = functools.partial(prompt_logprobs, output.prompt_logprobs)
            found.prompt_logprobs = await convert(make, output.prompt_logprobs)
        return found

    async def events() -> AsyncGenerator[bytes, None]:
        async for _, output in generation.outputs():
            yield encode_event(await response(output))
        if body.stream_options is not None and body.stream_options.include_usage:
            yield encode_event(GenerateResponse(request_id=call.request_id, choices=[], usage=generation.usage()))

    if body.stream:
        return EventStream(events())
    [result] = await generation.results()
    whole = await response(result)
    whole.usage = generation.usage()
    return json_response(whole)


async def _choice(completion: CompletionOutput, params: SamplingParams, engine: AsyncLLM) -> GeneratedChoice:
    logprobs = None
    if (positions := completion.logprobs) is not None:
        make = functools.partial(chat_logprobs, positions, params.logprobs or 0, engine.token_bytes)
        logprobs = await convert(make, positions)
    return GeneratedChoice(
        index=completion.index,
        token_ids=list(completion.token_ids),
        logprobs=logprobs,
        finish_reason=completion.finish_reason,
    )


ROUTES = [post("/inference/v1/generate", generate_tokens, GenerateBody, GenerateResponse)]
