"""The endpoint /v1/responses: the answer to a conversation, in OpenAI's newer form. Responses are not stored."""

import functools
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Send

from vllm_mp.client.async_llm import AsyncLLM
from vllm_mp.outputs import CompletionOutput
from vllm_mp.requests.sampling_params import SamplingParams
from vllm_mp.server.http.endpoint import Call, json_response, post
from vllm_mp.server.http.errors import ApiError
from vllm_mp.server.http.event_stream import EventStream
from vllm_mp.server.http.state import ServerState
from vllm_mp.server.openai.answer_parts import read_answer_format
from vllm_mp.server.openai.chat_messages import ChatMessage
from vllm_mp.server.openai.chat_prompt import RenderedChat, chat_prompt, prompt_tokens, template_variables
from vllm_mp.server.openai.generation import Generation, start_generation
from vllm_mp.server.openai.logprobs import TokenLogprob, chat_logprobs, convert
from vllm_mp.server.openai.models import check_model
from vllm_mp.server.openai.output_form import TextFormat
from vllm_mp.server.openai.responses.body import LOGPROBS, ResponseBody, TextConfig, choice_of
from vllm_mp.server.openai.responses.events import EventEncoder
from vllm_mp.server.openai.responses.input import (
    chat_messages,
    image_paths,
    num_images,
    turn_starts,
    without_older_turns,
)
from vllm_mp.server.openai.responses.object import InputTokensDetails, OutputTokensDetails, ResponseObject, Usage
from vllm_mp.server.openai.responses.output import ResponseOutput
from vllm_mp.server.openai.sampling_fields import sampling_params
from vllm_mp.server.openai.tools import ToolUse, read_tools


class InputTokens(msgspec.Struct):
    """The number of tokens of an input."""

    input_tokens: int
    object: str = "response.input_tokens"


async def create_response(call: Call, body: ResponseBody) -> Response | EventStream:
    """Answer a conversation."""
    model = check_model(call.server, body.model, generates=True)
    if body.background:
        message = "background must be false: this server stores no responses; wait for the answer, or stream it"
        raise ApiError(400, message, param="background", code="unsupported_field")
    params = _params(body, call.server.engine.model_config.default_sampling_params)
    template = call.server.engine.chat_template.source_for(has_tools=bool(body.tools))
    tools = _tools(body, call.server, params, template)
    rendered = await _prompt(call, body, tools)
    shows_thought = body.include_reasoning is not False
    answer_format = read_answer_format(call.server, params, template, rendered.text, tools, shows_thought)
    if params.logprobs is not None and not answer_format.is_plain:
        raise ApiError(
            400,
            "log-probabilities are not served here with tools or for a model that thinks; use /v1/chat/completions",
            param="include",
            code="unsupported_field",
        )
    # The template has written the special tokens.
    generation = await start_generation(
        call,
        "resp",
        [rendered.prompt(call.tenant.cache_salt(body.cache_salt))],
        params,
        body,
        field="input",
        add_special_tokens=False,
        lora=model.lora,
        tools=tools,
        image_paths=rendered.image_paths,
    )
    # The engine has the prompt now. The answer may take long, and its stream keeps the body.
    body.input = ""
    del rendered
    response = ResponseObject(
        id=f"resp_{call.request_id}",
        created_at=int(time.time()),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=model.name,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=body.reasoning,
        safety_identifier=body.safety_identifier,
        temperature=params.temperature,
        text=TextConfig(format=(body.text and body.text.format) or TextFormat(type="text")),
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=params.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
    )
    output = ResponseOutput(response, call.request_id, answer_format)
    if body.stream:
        encoder = EventEncoder()
        events = _events(generation, output, encoder, body, params, call.server.engine)
        return _ResponseStream(events, output, encoder)
    [result] = await generation.results()
    [completion] = result.outputs
    output.add(completion.text, completion.token_ids, await _logprobs(completion, body, params, call.server.engine))
    output.end(completion.finish_reason, _usage(generation))
    return json_response(response)


async def count_input_tokens(call: Call, body: ResponseBody) -> Response:
    """Count the tokens of an input."""
    check_model(call.server, body.model, generates=True)
    params = _params(body, call.server.engine.model_config.default_sampling_params)
    template = call.server.engine.chat_template.source_for(has_tools=bool(body.tools))
    rendered = await _prompt(call, body, _tools(body, call.server, params, template))
    tokens = await prompt_tokens(call, rendered.prompt(), field="input", image_paths=rendered.image_paths)
    return json_response(InputTokens(len(tokens)))


async def refuse_stored_response(request: Request) -> Response:
    """Refuse to find a response by its id: none is stored."""
    raise ApiError(
        404,
        f"the response {request.path_params['response_id'][:100]!r} does not exist: this server stores no responses; "
        "keep the answer, and send it in the input of the next turn",
        code="not_found",
        param="response_id",
    )


class _ResponseStream(EventStream):
    """A stream of events that ends with the response, also when it fails."""

    def __init__(self, chunks: AsyncGenerator[bytes, None], output: ResponseOutput, encoder: EventEncoder) -> None:
        super().__init__(chunks, end=b"")
        self._output = output
        self._encoder = encoder

    async def fail(self, error: ApiError, send: Send) -> None:
        await send({"type": "http.response.body", "body": self._encoder.encode(self._output.fail(error.message))})


def _params(body: ResponseBody, defaults: dict[str, Any]) -> SamplingParams:
    """Return the sampling parameters."""
    own: dict[str, Any] = {}
    if body.max_output_tokens is not None:
        own["max_tokens"] = body.max_output_tokens
    if body.top_logprobs or LOGPROBS in (body.include or ()):
        own["logprobs"] = body.top_logprobs or 0
    return sampling_params(body, {"max_tokens": None, **defaults}, **own)


def _tools(body: ResponseBody, server: ServerState, params: SamplingParams, template: str) -> ToolUse | None:
    """Return how the answer uses the tools of a request, and let `params` demand the form that it then has."""
    choice, allowed_names = choice_of(body.tool_choice)
    tools = read_tools(
        [tool.definition() for tool in body.tools or ()],
        choice,
        is_parallel=body.parallel_tool_calls is not False,
        form=params.structured_outputs,
        chat_template=template,
        parser_name=server.options.tool_call_parser,
        tool_fallback=server.options.tool_fallback,
        path="tools[{}]",
        form_field="text.format",
        allowed_names=allowed_names,
    )
    if tools is not None and tools.form is not None:
        params.structured_outputs = tools.form
    return tools


async def _prompt(call: Call, body: ResponseBody, tools: ToolUse | None) -> RenderedChat:
    """Return the prompt; with truncation "auto", of as many turns as the context has room for."""
    messages = chat_messages(body.input, body.instructions)
    rendered = await _rendered(call, body, messages, tools)
    if body.truncation != "auto" or await _fits(call, body, rendered):
        return rendered
    starts = turn_starts(messages)
    # The first start whose rest fits, by bisection: a shorter rest fits if a longer one does.
    low, high = min(1, len(starts) - 1), len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        rendered = await _rendered(call, body, without_older_turns(messages, starts[middle]), tools)
        if await _fits(call, body, rendered):
            high = middle
        else:
            low = middle + 1
    return await _rendered(call, body, without_older_turns(messages, starts[high]), tools)


async def _rendered(call: Call, body: ResponseBody, messages: list[ChatMessage], tools: ToolUse | None) -> RenderedChat:
    """Return `messages` as the chat template writes them."""
    effort = None if body.reasoning is None else body.reasoning.effort
    paths = image_paths(body.input)
    try:
        return await chat_prompt(
            call,
            messages,
            chat_template_kwargs=template_variables(effort, body.chat_template_kwargs),
            tools=None if tools is None else tools.definitions,
            image_paths=paths[len(paths) - num_images(messages) :],  # those of the oldest turns may be left out
        )
    except ApiError as error:
        if error.param is not None and error.param.startswith("messages"):
            error.param = "input"
        raise


async def _fits(call: Call, body: ResponseBody, rendered: RenderedChat) -> bool:
    """Return whether the context has room for the prompt and for the answer."""
    if rendered.images:
        prompt = rendered.prompt()
        tokens = await prompt_tokens(call, prompt, field="input", image_paths=rendered.image_paths)
        return len(tokens) + (body.max_output_tokens or 1) <= call.server.engine.model_config.max_model_len
    return await call.server.engine.has_room(rendered.text, body.max_output_tokens or 1, add_special_tokens=False)


async def _events(
    generation: Generation,
    output: ResponseOutput,
    encoder: EventEncoder,
    body: ResponseBody,
    params: SamplingParams,
    engine: AsyncLLM,
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a streamed response."""
    begin = encoder.encode(output.begin())
    if params.structured_outputs is None:
        yield begin
        begin = b""
    # A constraint may turn out to be wrong, which the status of the response says if no event was sent before.
    async for _, result in generation.outputs():
        [completion] = result.outputs
        logprobs = await _logprobs(completion, body, params, engine)
        events = output.add(completion.text, completion.token_ids, logprobs)
        if result.finished:
            events += output.end(completion.finish_reason, _usage(generation))
        if begin or events:
            yield begin + encoder.encode(events)
            begin = b""


async def _logprobs(
    output: CompletionOutput, body: ResponseBody, params: SamplingParams, engine: AsyncLLM
) -> list[TokenLogprob]:
    positions = output.logprobs
    if positions is None:
        return []
    as_ids = bool(body.return_tokens_as_token_ids)
    make = functools.partial(chat_logprobs, positions, params.logprobs or 0, engine.token_bytes, as_ids=as_ids)
    return (await convert(make, positions)).content


def _usage(generation: Generation) -> Usage:
    counts = generation.usage()
    return Usage(
        counts.prompt_tokens,
        InputTokensDetails(counts.prompt_tokens_details.cached_tokens),
        counts.completion_tokens,
        OutputTokensDetails(),
        counts.total_tokens,
    )


ROUTES = [
    post("/v1/responses", create_response, ResponseBody, ResponseObject),
    post("/v1/responses/input_tokens", count_input_tokens, ResponseBody, InputTokens),
    Route("/v1/responses/{response_id}", refuse_stored_response, methods=["GET", "DELETE"]),
    Route("/v1/responses/{response_id}/cancel", refuse_stored_response, methods=["POST"]),
    Route("/v1/responses/{response_id}/input_items", refuse_stored_response),
]
