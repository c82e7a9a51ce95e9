"""The endpoint /v1/chat/completions: answers to a conversation."""

import functools
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from vllm_mp.client.prompt import TextPrompt
from vllm_mp.outputs import CompletionOutput, RequestOutput
from vllm_mp.sampling_params import SamplingParams
from vllm_mp.server.body import Ignored, Refused, refused
from vllm_mp.server.chat_messages import ChatMessage
from vllm_mp.server.chat_prompt import chat_prompt
from vllm_mp.server.endpoint import Call, post
from vllm_mp.server.errors import ApiError
from vllm_mp.server.event_stream import TEXT_MARK, EventStream, TextEvent, encode_event
from vllm_mp.server.generation import Generation, GenerationBody, StreamOptions, Usage, start_generation
from vllm_mp.server.http_protocol import WriteNow
from vllm_mp.server.logprobs import ChatLogprobs, PromptLogprobs, chat_logprobs, convert, prompt_logprobs
from vllm_mp.server.models import check_model
from vllm_mp.server.output_form import ResponseFormat
from vllm_mp.server.sampling_fields import sampling_params

_NO_TOOLS = refused("is not served yet: tools cannot be called; leave it out")


class ChatBody(GenerationBody, kw_only=True):
    """A request for answers to a conversation."""

    messages: list[ChatMessage]
    add_generation_prompt: bool | None = None
    """Let the prompt end where the assistant's answer begins; default: unless the last message is continued."""
    continue_final_message: bool | None = None
    """Continue the last message, in place of an answer to it."""
    chat_template: str | None = None
    """A template in place of the model's; refused unless the server runs with --trust-request-chat-template."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the template."""
    max_completion_tokens: int | None = None
    """Maximum number of tokens of an answer; the newer name of `max_tokens`."""
    logprobs: bool | None = None
    """Return the log-probability of each token of the answer."""
    top_logprobs: int | None = None
    """Number of most likely tokens to return with each token."""
    response_format: ResponseFormat | None = None
    """The form of the answer; default: any text."""
    tools: Annotated[Annotated[list[Any], msgspec.Meta(max_length=0)] | None, _NO_TOOLS] = None
    tool_choice: Annotated[Literal["none"] | None, _NO_TOOLS] = None
    functions: Annotated[Annotated[list[Any], msgspec.Meta(max_length=0)] | None, _NO_TOOLS] = None
    function_call: Annotated[Literal["none"] | None, _NO_TOOLS] = None
    modalities: Annotated[list[Literal["text"]] | None, refused("must be ['text']")] = None
    audio: Refused = None
    web_search_options: Refused = None
    reasoning_effort: Refused = None
    verbosity: Refused = None
    parallel_tool_calls: Ignored = None
    prediction: Ignored = None


class AnswerMessage(msgspec.Struct, kw_only=True):
    """The answer of the assistant."""

    role: str = "assistant"
    content: str
    refusal: str | None = None


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


class Delta(msgspec.Struct, kw_only=True):
    """What is new of an answer."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


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


async def create_chat_completion(call: Call, body: ChatBody) -> Response | EventStream:
    """Answer a conversation."""
    model = check_model(call.server, body.model)
    params = _params(body, call.server.engine.model_config.default_sampling_params)
    text = await chat_prompt(
        call,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    prompt = TextPrompt(prompt=text, cache_salt=body.cache_salt or "")
    # The template has written the special tokens.
    generation = await start_generation(
        call, "chatcmpl", [prompt], params, body, field="messages", add_special_tokens=False, lora=model.lora
    )
    created = int(time.time())
    if body.stream:
        chunk = ChatChunk(id=generation.request_id, created=created, model=model.name, choices=[])
        return EventStream(_events(generation, chunk, body, call.write_now))
    [result] = await generation.results()
    response = ChatResponse(
        id=generation.request_id,
        created=created,
        model=model.name,
        choices=[
            ChatChoice(
                index=output.index,
                message=AnswerMessage(content=output.text),
                logprobs=await _logprobs(output, body),
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
                token_ids=output.token_ids if body.return_token_ids else UNSET,
            )
            for output in result.outputs
        ],
        usage=generation.usage(),
        prompt_logprobs=await _prompt_logprobs(result),
        prompt_token_ids=result.prompt_token_ids if body.return_token_ids else UNSET,
    )
    return Response(msgspec.json.encode(response), media_type="application/json")


def _params(body: ChatBody, defaults: dict[str, Any]) -> SamplingParams:
    """Return the sampling parameters. Raises ApiError for fields that contradict each other."""
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true; add it", param="top_logprobs")
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return sampling_params(body, {"max_tokens": None, **defaults}, logprobs=num_logprobs)


async def _logprobs(output: CompletionOutput, body: ChatBody) -> ChatLogprobs | None:
    positions = output.logprobs
    if positions is None:
        return None
    return await convert(functools.partial(chat_logprobs, positions, body.top_logprobs or 0), positions)


async def _prompt_logprobs(output: RequestOutput) -> PromptLogprobs | UnsetType:
    positions = output.prompt_logprobs
    if positions is None:
        return UNSET
    return await convert(functools.partial(prompt_logprobs, positions), positions)


async def _events(
    generation: Generation, chunk: ChatChunk, body: ChatBody, write_now: WriteNow
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream that `write_now` does not write.

    They are for each answer its role, its text, its end; then the usage.
    """
    options = body.stream_options or StreamOptions()
    chunk.usage = None if options.include_usage else UNSET
    only_text = not (body.logprobs or body.return_token_ids or options.continuous_usage_stats)
    text_events: dict[int, TextEvent] = {}

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
            chunk.usage = generation.usage()
        for completion in output.outputs:
            index = completion.index
            text_event = text_events.get(index)
            if text_event is None:
                chunk.choices = [ChunkChoice(index=index, delta=Delta(content=TEXT_MARK))]
                text_event = text_events[index] = TextEvent(chunk)
                chunk.choices = [ChunkChoice(index=index, delta=Delta(role="assistant", content=""))]
                if body.return_token_ids:
                    chunk.prompt_token_ids = output.prompt_token_ids
                if output.prompt_logprobs is not None:
                    chunk.prompt_logprobs = await _prompt_logprobs(output)
                events.append(encode_event(chunk))
                chunk.prompt_token_ids = chunk.prompt_logprobs = UNSET
            if not only_text:
                choice = ChunkChoice(
                    index=index,
                    delta=Delta(content=completion.text),
                    logprobs=await _logprobs(completion, body),
                    token_ids=completion.token_ids if body.return_token_ids else UNSET,
                )
                chunk.choices = [choice]
                events.append(encode_event(chunk))
            elif completion.text:
                events.append(text_event.encode(completion.text))
            if completion.finish_reason is not None:
                end = ChunkChoice(index=index, delta=Delta(), finish_reason=completion.finish_reason)
                end.stop_reason = completion.stop_reason
                chunk.choices = [end]
                events.append(encode_event(chunk))
        if events:
            yield b"".join(events)
    if options.include_usage:
        chunk.choices, chunk.usage = [], generation.usage()
        yield encode_event(chunk)


ROUTES = [post("/v1/chat/completions", create_chat_completion, ChatBody, ChatResponse)]
