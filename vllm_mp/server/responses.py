"""The endpoint /v1/responses: the answer to a conversation, in OpenAI's newer form. Responses are not stored."""

import functools
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Send

from vllm_mp.client.prompt import TextPrompt
from vllm_mp.outputs import CompletionOutput
from vllm_mp.server.body import Ignored, Refused, RequestBody, refused
from vllm_mp.server.chat_messages import ChatMessage
from vllm_mp.server.chat_prompt import chat_prompt
from vllm_mp.server.endpoint import Call, post
from vllm_mp.server.errors import ApiError
from vllm_mp.server.event_stream import EventStream
from vllm_mp.server.generation import Generation, GenerationBody, start_generation
from vllm_mp.server.logprobs import TokenLogprob, chat_logprobs, convert
from vllm_mp.server.models import check_model
from vllm_mp.server.response_events import ResponseEvents
from vllm_mp.server.response_input import InputItem, chat_messages, turn_starts, without_older_turns
from vllm_mp.server.response_object import (
    InputTokensDetails,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    ResponseObject,
    Usage,
)
from vllm_mp.server.sampling_fields import sampling_params

_NOTHING_STORED = refused("is not served: this server stores no responses; send the earlier turns in input")
_NO_TOOLS = refused("is not served yet: tools cannot be called; leave it out")
_LOGPROBS = "message.output_text.logprobs"


class TextFormat(msgspec.Struct):
    """The format of the text."""

    type: Annotated[Literal["text"], refused("must be 'text': structured output is not served yet")]


class TextConfig(msgspec.Struct):
    """The settings of the text."""

    format: TextFormat | None = None
    verbosity: Annotated[Literal["medium"] | None, refused("must be 'medium': no other is served")] = None


class Reasoning(msgspec.Struct):
    """The settings of a reasoning part, which no answer has."""

    effort: Annotated[Literal["none"] | None, refused("must be 'none': reasoning is not served yet")] = None
    summary: Refused = None


class ObfuscationOptions(RequestBody):
    """What a stream holds beside the text."""

    include_obfuscation: Ignored = None


class ResponseBody(GenerationBody, kw_only=True):
    """A request for a response."""

    input: str | list[InputItem]
    """A text, or the turns of a conversation."""
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] | None = None
    """Maximum number of tokens of the answer; default: what the context has room for."""
    truncation: Literal["auto", "disabled"] | None = None
    """ "auto": leave out the oldest turns of a conversation that is too long for the context."""
    include: (
        list[
            Literal[
                "message.output_text.logprobs",
                "code_interpreter_call.outputs",
                "computer_call_output.output.image_url",
                "file_search_call.results",
                "message.input_image.image_url",
                "reasoning.encrypted_content",
                "web_search_call.action.sources",
                "web_search_call.results",
            ]
        ]
        | None
    ) = None
    """Further data for the answer; all but the log-probabilities belong to items that no answer has."""
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    """Number of most likely tokens to return with each token."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""
    metadata: (
        Annotated[
            dict[Annotated[str, msgspec.Meta(max_length=64)], Annotated[str, msgspec.Meta(max_length=512)]],
            msgspec.Meta(max_length=16),
        ]
        | None
    ) = None
    """Repeated in the response."""
    parallel_tool_calls: bool | None = None
    """Repeated in the response."""
    prompt_cache_key: str | None = None
    """Repeated in the response."""
    safety_identifier: str | None = None
    """Repeated in the response."""
    user: str | None = None
    """Repeated in the response."""
    store: bool | None = None
    """Without effect: no response is stored, and each one says so."""
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[Annotated[list[Any], msgspec.Meta(max_length=0)] | None, _NO_TOOLS] = None
    tool_choice: Annotated[Literal["auto", "none"] | None, _NO_TOOLS] = None
    max_tool_calls: Ignored = None
    stream_options: ObfuscationOptions | None = None  # type: ignore[assignment]
    background: bool | None = None
    """Must not be true: a response that is not waited for would have to be stored."""
    conversation: Annotated[None, _NOTHING_STORED] = None
    previous_response_id: Annotated[None, _NOTHING_STORED] = None
    prompt: Annotated[None, _NOTHING_STORED] = None
    background_options: Refused = None
    context_management: Refused = None
    moderation: Refused = None
    prompt_cache_options: Refused = None
    max_tokens: Annotated[None, refused("is called max_output_tokens here")] = None
    n: Annotated[None, refused("is not served here: a response holds one answer")] = None
    best_of: Annotated[None, refused("is not served here: a response holds one answer")] = None
    logprobs: Annotated[None, refused(f"is not served here; set include to ['{_LOGPROBS}']")] = None
    prompt_logprobs: Annotated[None, refused("is not served here; use /v1/completions")] = None
    return_token_ids: Annotated[None, refused("is not served here; use /v1/chat/completions")] = None


async def create_response(call: Call, body: ResponseBody) -> Response | EventStream:
    """Answer a conversation."""
    model = check_model(call.server, body.model)
    if body.background:
        message = "background must be false: this server stores no responses; wait for the answer, or stream it"
        raise ApiError(400, message, param="background", code="unsupported_field")
    own: dict[str, Any] = {}
    if body.max_output_tokens is not None:
        own["max_tokens"] = body.max_output_tokens
    if body.top_logprobs or _LOGPROBS in (body.include or ()):
        own["logprobs"] = body.top_logprobs or 0
    defaults = call.server.engine.model_config.default_sampling_params
    params = sampling_params(body, {"max_tokens": None, **defaults}, **own)
    prompt = TextPrompt(prompt=await _prompt(call, body), cache_salt=body.cache_salt or "")
    # The template has written the special tokens.
    generation = await start_generation(
        call, "resp", [prompt], params, body, field="input", add_special_tokens=False, lora=model.lora
    )
    response = ResponseObject(
        id=f"resp_{call.request_id}",
        created_at=int(time.time()),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=model.name,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        prompt_cache_key=body.prompt_cache_key,
        safety_identifier=body.safety_identifier,
        temperature=params.temperature,
        tool_choice=body.tool_choice or "auto",
        top_logprobs=body.top_logprobs or 0,
        top_p=params.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
    )
    message_id = f"msg_{call.request_id}"
    if body.stream:
        events = ResponseEvents(response, message_id)
        return _ResponseStream(_events(generation, events, response.top_logprobs), events)
    [result] = await generation.results()
    [output] = result.outputs
    text = OutputText(output.text, logprobs=await _logprobs(output, response.top_logprobs))
    response.end(OutputMessage(message_id, "completed", [text]), output.finish_reason, _usage(generation))
    return Response(msgspec.json.encode(response), media_type="application/json")


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

    def __init__(self, chunks: AsyncGenerator[bytes, None], events: ResponseEvents) -> None:
        super().__init__(chunks, end=b"")
        self._response_events = events

    async def fail(self, error: ApiError, send: Send) -> None:
        await send({"type": "http.response.body", "body": self._response_events.fail(error.message)})


async def _prompt(call: Call, body: ResponseBody) -> str:
    """Return the text of the prompt; with truncation "auto", of as many turns as the context has room for."""
    messages = chat_messages(body.input, body.instructions)
    text = await _rendered(call, body, messages)
    if body.truncation != "auto" or await _fits(call, body, text):
        return text
    starts = turn_starts(messages)
    # The first start whose rest fits, by bisection: a shorter rest fits if a longer one does.
    low, high = min(1, len(starts) - 1), len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        text = await _rendered(call, body, without_older_turns(messages, starts[middle]))
        if await _fits(call, body, text):
            high = middle
        else:
            low = middle + 1
    return await _rendered(call, body, without_older_turns(messages, starts[high]))


async def _rendered(call: Call, body: ResponseBody, messages: list[ChatMessage]) -> str:
    """Return `messages` as the chat template writes them."""
    try:
        return await chat_prompt(call, messages, chat_template_kwargs=body.chat_template_kwargs)
    except ApiError as error:
        if error.param == "messages":
            error.param = "input"
        raise


async def _fits(call: Call, body: ResponseBody, text: str) -> bool:
    """Return whether the context has room for the prompt `text` and for the answer."""
    return await call.server.engine.has_room(text, body.max_output_tokens or 1, add_special_tokens=False)


async def _events(generation: Generation, events: ResponseEvents, num_top: int) -> AsyncGenerator[bytes, None]:
    """Yield the events of a streamed response."""
    yield events.begin()
    async for _, output in generation.outputs():
        [completion] = output.outputs
        if new := events.delta(completion.text, await _logprobs(completion, num_top)):
            yield new
        if output.finished:
            yield events.end(completion.finish_reason, _usage(generation))


async def _logprobs(output: CompletionOutput, num_top: int) -> list[TokenLogprob]:
    positions = output.logprobs
    if positions is None:
        return []
    return (await convert(functools.partial(chat_logprobs, positions, num_top), positions)).content


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
    Route("/v1/responses/{response_id}", refuse_stored_response, methods=["GET", "DELETE"]),
    Route("/v1/responses/{response_id}/cancel", refuse_stored_response, methods=["POST"]),
    Route("/v1/responses/{response_id}/input_items", refuse_stored_response),
]
