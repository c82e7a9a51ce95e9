"""The endpoint /v1/chat/completions: answers to a conversation."""

import functools
import time
from collections.abc import AsyncGenerator, Iterable
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from vllm_mp.client.async_llm import AsyncLLM
from vllm_mp.client.prompts.prompt import TextPrompt
from vllm_mp.outputs import CompletionOutput, RequestOutput
from vllm_mp.requests.sampling_params import SamplingParams
from vllm_mp.server.http.body import Ignored, Refused, refused, unserved
from vllm_mp.server.http.endpoint import Call, json_response, post
from vllm_mp.server.http.errors import ApiError
from vllm_mp.server.http.event_stream import TEXT_MARK, EventStream, TextEvent, encode_event
from vllm_mp.server.http.protocol import WriteNow
from vllm_mp.server.http.state import ServerState
from vllm_mp.server.openai.answer_parts import (
    AnswerFormat,
    AnswerMessage,
    AnswerParts,
    Delta,
    is_empty,
    read_answer_format,
)
from vllm_mp.server.openai.chat_messages import ChatMessage
from vllm_mp.server.openai.chat_prompt import ReasoningEffort, chat_prompt, template_variables
from vllm_mp.server.openai.generation import (
    CompletionTokensDetails,
    Generation,
    GenerationBody,
    StreamOptions,
    Usage,
    start_generation,
)
from vllm_mp.server.openai.logprobs import ChatLogprobs, PromptLogprobs, chat_logprobs, convert, prompt_logprobs
from vllm_mp.server.openai.models import ChosenModel, check_model
from vllm_mp.server.openai.output_form import ResponseFormat
from vllm_mp.server.openai.sampling_fields import sampling_params
from vllm_mp.server.openai.tools import ToolChoice, ToolDefinition, ToolUse, choice_of, read_tools

_USE_TOOLS = refused("is the older form of tools and tool_choice, which are served; use these")


class ChatBody(GenerationBody, kw_only=True):
    """A request for answers to a conversation."""

    messages: list[ChatMessage]
    add_generation_prompt: bool | None = None
    """Let the prompt end where the assistant's answer begins; default: unless the last message is continued."""
    continue_final_message: bool | None = None
    """Continue the last message, instead of an answer to it."""
    chat_template: str | None = None
    """A template instead of the model's; refused unless the server runs with --trust-request-chat-template."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the template."""
    mm_processor_kwargs: dict[str, Any] | None = None
    """Options of the model's image processor for the images of the messages."""
    max_completion_tokens: int | None = None
    """Maximum number of tokens of an answer; the newer name of `max_tokens`."""
    logprobs: bool | None = None
    """Return the log-probability of each token of the answer."""
    top_logprobs: int | None = None
    """Number of most likely tokens to return with each token."""
    response_format: ResponseFormat | None = None
    """The form of the answer; default: any text."""
    tools: list[ToolDefinition] | None = None
    """Functions that the model may call."""
    tool_choice: ToolChoice | None = None
    """Whether the model calls functions; default: it decides."""
    parallel_tool_calls: bool | None = None
    """False: an answer has at most one call."""
    include_reasoning: bool | None = None
    """False: leave out the thought of a model that thinks."""
    reasoning_effort: ReasoningEffort | None = None
    """How much the model thinks, if its chat template knows that; "none" also sets `enable_thinking` to false."""
    functions: Annotated[Annotated[list[Any], msgspec.Meta(max_length=0)] | None, _USE_TOOLS] = None
    function_call: Annotated[Literal["none"] | None, _USE_TOOLS] = None
    modalities: Annotated[list[Literal["text"]] | None, refused("must be ['text']")] = None
    audio: Refused = None
    web_search_options: Annotated[None, unserved()] = None
    verbosity: Annotated[None, unserved()] = None
    prediction: Ignored = None


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended the answer."""
    token_ids: list[int] | UnsetType = UNSET


class ChatResponse(msgspec.Struct, kw_only=True):
    """The answers to a conversation."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, kw_only=True):
    """The next part of an answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """An event of a stream of answers."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatRequest(NamedTuple):
    """What the engine is asked for."""

    model: ChosenModel
    prompt: TextPrompt
    """The template has written the special tokens."""
    params: SamplingParams
    answer_format: AnswerFormat
    tools: ToolUse | None
    image_paths: list[str]
    """The fields that have the images of the prompt."""


async def chat_request(call: Call, body: ChatBody) -> ChatRequest:
    """Return what a request for answers asks of the engine. Raises ApiError, naming the field at fault."""
    model = check_model(call.server, body.model, generates=True)
    params = _params(body, call.server.engine.model_config.default_sampling_params)
    template = body.chat_template or call.server.engine.chat_template.source_for(has_tools=bool(body.tools))
    tools = _tools(body, call.server, params, template)
    rendered = await chat_prompt(
        call,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template=body.chat_template,
        chat_template_kwargs=template_variables(body.reasoning_effort, body.chat_template_kwargs),
        tools=None if tools is None else tools.definitions,
    )
    shows_thought = body.include_reasoning is not False
    answer_format = read_answer_format(
        call.server, params, template, rendered.text, tools, shows_thought, begun=rendered.begun
    )
    prompt = rendered.prompt(call.tenant.cache_salt(body.cache_salt), body.mm_processor_kwargs)
    return ChatRequest(model, prompt, params, answer_format, tools, rendered.image_paths)


async def create_chat_completion(call: Call, body: ChatBody) -> Response | EventStream:
    """Answer a conversation."""
    model, prompt, params, answer_format, tools, image_paths = await chat_request(call, body)
    generation = await start_generation(
        call,
        "chatcmpl",
        [prompt],
        params,
        body,
        field="messages",
        add_special_tokens=False,
        lora=model.lora,
        tools=tools,
        image_paths=image_paths,
    )
    continues = body.continue_final_message or body.add_generation_prompt is False
    role = body.messages[-1].role if continues else call.server.options.response_role
    # The engine has the prompt now. The answer may take long, and its stream keeps the body.
    body.messages = []
    del prompt
    created = int(time.time())
    if body.stream:
        chunk = ChatChunk(id=generation.request_id, created=created, model=model.name, choices=[])
        return EventStream(_events(generation, chunk, body, answer_format, role, call.write_now, call.server.engine))
    [result] = await generation.results()
    parts = [answer_format.whole(output.text, output.token_ids) for output in result.outputs]
    response = ChatResponse(
        id=generation.request_id,
        created=created,
        model=model.name,
        choices=[
            ChatChoice(
                index=output.index,
                message=part.message(role),
                logprobs=await _logprobs(output, body, call.server.engine),
                finish_reason=part.finish_reason(output.finish_reason),
                stop_reason=output.stop_reason,
                token_ids=output.token_ids if body.return_token_ids else UNSET,
            )
            for output, part in zip(result.outputs, parts, strict=True)
        ],
        usage=_usage(generation, answer_format, parts),
        prompt_logprobs=await _prompt_logprobs(result),
        prompt_token_ids=result.prompt_token_ids if body.return_token_ids else UNSET,
    )
    return json_response(response)


def _params(body: ChatBody, defaults: dict[str, Any]) -> SamplingParams:
    """Return the sampling parameters. Raises ApiError for fields that contradict each other."""
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true; add it", param="top_logprobs")
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return sampling_params(body, {"max_tokens": None, **defaults}, logprobs=num_logprobs)


def _tools(body: ChatBody, server: ServerState, params: SamplingParams, template: str) -> ToolUse | None:
    """Return how answers use the tools of a request, and let `params` demand the form that an answer then has."""
    choice, allowed_names = choice_of(body.tool_choice)
    tools = read_tools(
        [tool.function for tool in body.tools or ()],
        choice,
        is_parallel=body.parallel_tool_calls is not False,
        form=params.structured_outputs,
        chat_template=template,
        parser_name=server.options.tool_call_parser,
        tool_fallback=server.options.tool_fallback,
        allowed_names=allowed_names,
    )
    if tools is not None and tools.form is not None:
        params.structured_outputs = tools.form
    return tools


def _usage(generation: Generation, answer_format: AnswerFormat, parts: Iterable[AnswerParts]) -> Usage:
    """Return the tokens so far; `parts` are those of all answers."""
    usage = generation.usage()
    if answer_format.reasoning is not None:
        usage.completion_tokens_details = CompletionTokensDetails(sum(each.num_reasoning_tokens for each in parts))
    return usage


async def _logprobs(output: CompletionOutput, body: ChatBody, engine: AsyncLLM) -> ChatLogprobs | None:
    positions = output.logprobs
    if positions is None:
        return None
    as_ids = bool(body.return_tokens_as_token_ids)
    make = functools.partial(chat_logprobs, positions, body.top_logprobs or 0, engine.token_bytes, as_ids=as_ids)
    return await convert(make, positions)


async def _prompt_logprobs(output: RequestOutput) -> PromptLogprobs | UnsetType:
    positions = output.prompt_logprobs
    if positions is None:
        return UNSET
    return await convert(functools.partial(prompt_logprobs, positions), positions)


async def _events(
    generation: Generation,
    chunk: ChatChunk,
    body: ChatBody,
    answer_format: AnswerFormat,
    role: str,
    write_now: WriteNow,
    engine: AsyncLLM,
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream that `write_now` does not write.

    They are for each answer its role, its text, its end; then the usage.
    """
    options = body.stream_options or StreamOptions()
    chunk.usage = None if options.include_usage else UNSET
    is_plain = answer_format.is_plain
    only_text = is_plain and not (body.logprobs or body.return_token_ids or options.continuous_usage_stats)
    text_events: dict[int, TextEvent] = {}
    parts: dict[int, AnswerParts] = {}

    def pass_on(_: int, output: RequestOutput) -> bool:
        if len(output.outputs) != 1 or not only_text:
            return False
        completion = output.outputs[0]
        text_event = text_events.get(completion.index)
        if text_event is None or completion.finish_reason is not None:
            return False
        return not completion.text or write_now(text_event.encode(completion.text))

    async for _, output in generation.outputs(pass_on):
        events = []
        if options.continuous_usage_stats:
            chunk.usage = _usage(generation, answer_format, parts.values())
        for completion in output.outputs:
            index = completion.index
            text_event = text_events.get(index)
            if text_event is None:
                chunk.choices = [ChunkChoice(index=index, delta=Delta(content=TEXT_MARK))]
                text_event = text_events[index] = TextEvent(chunk)
                parts[index] = answer_format.begin()
                chunk.choices = [ChunkChoice(index=index, delta=Delta(role=role, content=""))]
                if body.return_token_ids:
                    chunk.prompt_token_ids = output.prompt_token_ids
                if output.prompt_logprobs is not None:
                    chunk.prompt_logprobs = await _prompt_logprobs(output)
                events.append(encode_event(chunk))
                chunk.prompt_token_ids = chunk.prompt_logprobs = UNSET
            if not only_text:
                if is_plain:
                    delta = Delta(content=completion.text)
                else:
                    delta = parts[index].feed(completion.text, completion.token_ids)
                if options.continuous_usage_stats:
                    chunk.usage = _usage(generation, answer_format, parts.values())
                choice = ChunkChoice(
                    index=index,
                    delta=delta,
                    logprobs=await _logprobs(completion, body, engine),
                    token_ids=completion.token_ids if body.return_token_ids else UNSET,
                )
                chunk.choices = [choice]
                if is_plain or not is_empty(delta) or choice.logprobs is not None or choice.token_ids is not UNSET:
                    events.append(encode_event(chunk))
            elif completion.text:
                events.append(text_event.encode(completion.text))
            if completion.finish_reason is not None:
                if not is_empty(delta := parts[index].finish()):
                    chunk.choices = [ChunkChoice(index=index, delta=delta)]
                    events.append(encode_event(chunk))
                reason = parts[index].finish_reason(completion.finish_reason)
                end = ChunkChoice(index=index, delta=Delta(), finish_reason=reason)
                end.stop_reason = completion.stop_reason
                chunk.choices = [end]
                events.append(encode_event(chunk))
        if events:
            yield b"".join(events)
    if options.include_usage:
        chunk.choices, chunk.usage = [], _usage(generation, answer_format, parts.values())
        yield encode_event(chunk)


ROUTES = [post("/v1/chat/completions", create_chat_completion, ChatBody, ChatResponse)]
